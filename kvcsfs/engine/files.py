"""Where file work runs: in threads, or on the event loop where that is safe and cheaper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, TypeVar, TypeVarTuple

import trio

from kvcsfs.engine.store import SlotStore

THREADS = 16
BRIEF_ITEMS = 8  # done on the loop in one go
BRIEF_SECONDS = 0.02  # longer for so many, and the file system doesn't answer at once
SLOW_SECONDS = 10.0  # then threads do it for so long

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Files:
    """Runs the file work of one mountpoint. What has begun is waited for to its end, whoever is cancelled."""

    def __init__(self, store: SlotStore) -> None:
        self._store = store
        self._limiter = trio.CapacityLimiter(THREADS)
        self._slow_until = 0.0 if store.is_local and not store.durable else float("inf")

    async def run(self, job: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run file work in a thread."""
        with trio.CancelScope(shield=True):
            result = await trio.to_thread.run_sync(job, *args, limiter=self._limiter)
        return result

    async def brief(self, job: Callable[..., list[T]], *columns: Sequence[Any]) -> list[T]:
        """Run a job of microseconds an item: `job(store, *columns)` gives a result for each position.

        On the loop while a local file system answers at once: each system call in a thread is a fight for the
        interpreter lock, which doubles the price of a small put. A slice that took long sends the rest, and all for a
        while, to a thread.
        """
        results: list[T] = []
        for start in range(0, len(columns[0]), BRIEF_ITEMS):
            begin = perf_counter()
            if begin < self._slow_until:
                return results + await self.run(job, self._store, *[column[start:] for column in columns])
            results += job(self._store, *[column[start : start + BRIEF_ITEMS] for column in columns])
            if perf_counter() - begin > BRIEF_SECONDS:
                self._slow_until = begin + SLOW_SECONDS
        return results
