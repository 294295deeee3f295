"""The threads that move the bytes of one call, and what they have to do.

Work lies in two queues. `ready` holds what never waits for a disk: the caller takes from it as well, which saves a
thread switch and keeps cached data moving although every worker hangs in a broken disk. `slow` is for workers alone.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from kvcsfs.sdk.deadline import Deadline
from kvcsfs.sdk.workers import Pool

if TYPE_CHECKING:
    from kvcsfs.sdk.transfer import Transfer

log = logging.getLogger("kvcs")

PROCESSORS = len(os.sched_getaffinity(0))
OTHERS = max(1, PROCESSORS - 1)  # threads beside the caller's; one at least, as it may wait for the daemon
BUSY_SHARE = 0.25  # a piece that has the processor for less of its time waited, for a disk
QUEUED_SHARE = (
    0.5  # or, if it was ready for so much of its time, for a processor: then more threads only make it worse
)


class Seat:
    """A thread's place in a crew. `inside`: it may touch the caller's memory right now.

    `queued`: what `queued_seconds` was when the thread last looked.
    """

    __slots__ = ("inside", "queued")

    def __init__(self) -> None:
        self.inside = False
        self.queued = 0.0


Piece: TypeAlias = "tuple[Callable[..., None], tuple[Any, ...]]"
_Queue: TypeAlias = "deque[tuple[Transfer, Callable[..., None], tuple[Any, ...]]]"


class Crew:
    """Invariant, under `_lock`: while something is queued, a helper is in its loop, or the caller is about to be."""

    def __init__(self, pool: Pool, slow_threads: int) -> None:
        """Slow work begins with `slow_threads`, and gets one more for each that turns out to wait."""
        self._pool, self._slow_threads = pool, min(slow_threads, pool.size)
        self._ready: _Queue = deque()
        self._slow: _Queue = deque()
        self._seats: list[Seat] = []
        self._helpers = 0
        self._lock = threading.Lock()

    def add(self, transfer: Transfer, pieces: Sequence[Piece], slow: bool) -> None:
        """Queue work of a transfer and call helpers for it."""
        with self._lock:
            (self._slow if slow else self._ready).extend((transfer, run, args) for run, args in pieces)
            # Ready work keeps processors busy: more threads than those only wait for each other, and the caller is one.
            wanted = min(len(self._slow), self._slow_threads) or min(OTHERS, len(self._ready) - 1)
            calls = max(0, min(wanted, self._pool.size) - self._helpers)
            self._helpers += calls
        for _ in range(calls):
            self._pool.submit(self._help)

    def drop(self, transfer: Transfer) -> int:
        """Take back the pieces of a transfer that nobody has begun; return how many those were."""
        dropped = 0
        with self._lock:
            for queue in (self._ready, self._slow):
                for _ in range(len(queue)):
                    try:
                        piece = queue.popleft()
                    except IndexError:  # workers take from it too
                        break
                    if piece[0] is transfer:
                        dropped += 1
                    else:
                        queue.append(piece)
        return dropped

    def help_out(self, deadline: Deadline) -> None:
        """Do what is ready, in the caller's thread."""
        seat = self._sit_down()
        while not deadline.passed() and self._step(self._ready, seat):
            pass

    def leave(self) -> None:
        """Return once nobody touches the caller's memory. Whoever gets there later must see that it is over."""
        for seat in list(self._seats):
            while seat.inside:  # a copy of at most transfer.RANGE_BYTES
                time.sleep(0.0002)

    def _sit_down(self) -> Seat:
        seat = Seat()
        self._seats.append(seat)
        return seat

    def _help(self) -> None:
        seat = self._sit_down()
        seat.queued = queued_seconds() if self._slow else 0.0
        while True:
            try:
                while self._step(self._ready, seat) or self._step_slowly(seat):
                    pass
            except Exception:  # as of memory that can't be had; what is queued still needs somebody
                log.exception("a worker's job failed")
            with self._lock:
                if not self._ready and not self._slow:
                    self._helpers -= 1
                    return

    def _step(self, queue: _Queue, seat: Seat) -> bool:
        try:
            transfer, run, args = queue.popleft()
        except IndexError:
            return False
        try:
            run(seat, *args)
        finally:
            seat.inside = False
            transfer.finish_one()
        return True

    def _step_slowly(self, seat: Seat) -> bool:
        if not self._slow:
            return False
        begin, busy = time.perf_counter(), time.thread_time()
        stepped = self._step(self._slow, seat)
        took = time.perf_counter() - begin
        if time.thread_time() - busy < BUSY_SHARE * took:
            before, seat.queued = seat.queued, queued_seconds()
            if seat.queued - before < QUEUED_SHARE * took:
                self._add_thread()
        return stepped

    def _add_thread(self) -> None:
        """Have one more thread take what nobody has begun."""
        with self._lock:
            if not self._slow or self._helpers >= self._pool.size:
                return
            self._helpers += 1
        self._pool.submit(self._help)


def queued_seconds() -> float:
    """How long this thread has been ready to run without a processor, since it began; 0 if the kernel doesn't count it.

    The second number of schedstat (Documentation/scheduler/sched-stats.rst).
    """
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
