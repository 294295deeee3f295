"""SIGINT and SIGTERM end a benchmark through its clean-up, never past it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def interrupt_on_sigterm() -> None:
    """Make SIGTERM raise KeyboardInterrupt in the main thread, as SIGINT does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Finish the block first, then raise KeyboardInterrupt if a signal came meanwhile. Main thread only."""
    arrived: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: arrived.append(number)) for number in SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if arrived:
        raise KeyboardInterrupt
