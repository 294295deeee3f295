"""Jobs of many values that an engine submits now and asks about later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Job(Generic[T]):
    """One job: which of its values are done, in their order, and how long it took once all are."""

    def __init__(self, tag: T, values: int) -> None:
        self.tag, self.seconds = tag, 0.0
        self.ok = [False] * values
        self._left, self._start = values, time.monotonic()

    def ended(self) -> bool:
        self.seconds = time.monotonic() - self._start
        return self._left == 0

    def settle(self, place: int, ok: bool) -> None:
        self.ok[place] = ok
        self._left -= 1

    def settle_all(self, ok: list[bool]) -> None:
        self.ok, self._left = ok, 0


class Jobs(Generic[T]):
    """Jobs under way and jobs that ended. Any thread may settle a value.

    Invariant: a job is in `_running` until its last value is settled, then in `_ended` until it is taken.
    """

    def __init__(self, on_end: Callable[[], None] = lambda: None) -> None:
        """`on_end` is called after each job that ended, in the thread that settled its last value."""
        self._changed = threading.Condition()
        self._running: set[Job[T]] = set()
        self._ended: list[Job[T]] = []
        self._on_end = on_end

    def start(self, tag: T, values: int) -> Job[T]:
        job = Job(tag, values)
        with self._changed:
            self._running.add(job)
        if not values:
            self._finish(job)
        return job

    def settle(self, job: Job[T], place: int, ok: bool) -> None:
        """Say that the value at `place` is done; each place once."""
        with self._changed:
            job.settle(place, ok)
            ended = job.ended()
        if ended:
            self._finish(job)

    def settle_all(self, job: Job[T], ok: list[bool]) -> None:
        """`settle` for all of a job's values, of which none is settled yet."""
        with self._changed:
            job.settle_all(ok)
            ended = job.ended() and bool(ok)  # one without values ended as it was started
        if ended:
            self._finish(job)

    def take(self) -> list[Job[T]]:
        """The jobs that ended since the last call."""
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no job is under way; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout_s)

    def __len__(self) -> int:
        with self._changed:
            return len(self._running)

    def _finish(self, job: Job[T]) -> None:
        with self._changed:
            self._running.discard(job)
            self._ended.append(job)
            self._changed.notify_all()
        self._on_end()
