"""What tests of the SDK share: a daemon that does as it is told, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcsfs.sdk import KvcsLowLevelClient
from tests.sdk.fake_daemon import FakeDaemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path)
    yield fake
    fake.stop()


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[KvcsLowLevelClient]:
    with KvcsLowLevelClient(daemon.path) as made:
        yield made
