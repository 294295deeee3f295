"""What tests of connectors share: the connector under test, and a real daemon that is empty at each test's start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.connectors.fakes.imported import connector
from tests.engines.daemon import Daemon


@pytest.fixture(scope="module")
def module(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The connector that a test module names as `CONNECTOR`, with the fakes of its engine."""
    with connector(*request.module.CONNECTOR) as made:
        yield made


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("store"), 64 << 20) as made:
        yield made


@pytest.fixture
def daemon(running: Daemon) -> Daemon:
    running.empty()
    return running
