"""What every test gets: a warning in the log that the test did not announce fails it."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Iterator

import pytest

# A shell starts what it runs in the background with SIGINT ignored, and our children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure() -> None:
    """In CI a mount test that would be skipped is a failure."""
    if os.environ.get("CI") and not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.exit("/dev/fuse can't be opened: no mount test would run", returncode=1)


@pytest.fixture
def expected_warnings() -> list[str]:
    """Regular expressions of log messages that this test is about; a test appends to it."""
    return []


@pytest.fixture(autouse=True)
def _log_police(caplog: pytest.LogCaptureFixture, expected_warnings: list[str]) -> Iterator[None]:
    yield
    for record in caplog.get_records("call"):
        message = record.getMessage()
        if record.levelno >= logging.WARNING and record.name.startswith("kvcsfs"):
            assert any(re.search(e, message) for e in expected_warnings), f"undeclared warning: {message}"


@pytest.fixture
def in_threads(monkeypatch):
    """Have file work run in threads, as on a file system that isn't local: a test can hold it there."""
    monkeypatch.setattr("kvcsfs.engine.store._LOCAL", frozenset())
