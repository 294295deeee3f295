"""What the engines' tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.daemon import Daemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon that has room for all that a test stores."""
    with Daemon(tmp_path, 256 << 20) as made:
        yield made
