"""Samples of timed calls and what is said about them."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvcs import BufferPool

PAGE = 4096


@dataclass(frozen=True, slots=True)
class Sample:
    """One call: when it began and how long it took (seconds), and what came of its keys."""

    start: float
    seconds: float
    keys: int
    bytes: int
    misses: int
    failures: Counter[str]  # by the name of the errno, or a query's status

    @property
    def errors(self) -> int:
        """Keys that failed."""
        return self.failures.total()


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles of the calls, in milliseconds; all 0 without calls."""

    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest of `ordered` that at least `share` of them do not exceed (nearest rank); 0.0 of none."""
    if not ordered:
        return 0.0
    return ordered[max(1, math.ceil(share * len(ordered))) - 1]


def latency(seconds: Iterable[float]) -> Latency:
    """The percentiles of call times given in seconds."""
    ordered = sorted(s * 1e3 for s in seconds)
    p50, p90, p99, top = (percentile(ordered, share) for share in (0.5, 0.9, 0.99, 1.0))
    return Latency(p50, p90, p99, top)


@contextmanager
def touched_buffers(count: int, size: int) -> Iterator[list[memoryview]]:
    """`count` page-aligned buffers of `size` bytes, filled with random bytes.

    Filled, since the first touch of fresh memory costs more than reading a value into it, and would be
    measured as the store's.
    """
    content = os.urandom(min(size, 1 << 20))
    with BufferPool(count, size).take(count) as buffers:
        views = [buffer[:size] for buffer in buffers]  # the pool rounds up to pages
        for view in views:
            for offset in range(0, size, len(content)):
                part = view[offset : offset + len(content)]
                part[:] = content[: len(part)]
        yield views
