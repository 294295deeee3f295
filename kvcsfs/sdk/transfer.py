"""The bytes of one part of a batch, moved by the calling thread and the workers together.

Work lies in two queues. `ready` holds what never waits for a disk: the caller takes from it as well, which saves a
thread switch and keeps cached data moving although every worker hangs in a broken disk. `slow` is for workers alone.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from kvcsfs.sdk.connection import close_fds
from kvcsfs.sdk.deadline import Deadline
from kvcsfs.sdk.workers import Pool

log = logging.getLogger("kvcs")

TASK_BYTES = (
    1 << 20
)  # small values are grouped to about this; less costs more in hand-overs than it gains in balance
RANGE_BYTES = 8 << 20  # large ones are cut; no step inside the caller's memory takes longer than copying this
WHOLE_BYTES = (
    64 << 20
)  # up to here a hashed value is one piece of work: hashing beside the transfer is cheaper
PROCESSORS = len(os.sched_getaffinity(0))
OTHERS = max(1, PROCESSORS - 1)  # threads beside the caller's; one at least, as it may wait for the daemon
BUSY_SHARE = 0.25  # a piece that has the processor for less of its time waited, for a disk
QUEUED_SHARE = (
    0.5  # or, if it was ready for so much of its time, for a processor: then more threads only make it worse
)
IOV_MAX = 1024  # of one preadv or pwritev, sysconf(_SC_IOV_MAX)

PENDING = -(1 << 31)  # status of a key that nobody has answered yet


class Seat:
    """A thread's place at a transfer. `inside`: it may touch the caller's memory right now.

    `queued`: what `queued_seconds` was when the thread last looked.
    """

    __slots__ = ("inside", "queued")

    def __init__(self) -> None:
        self.inside = False
        self.queued = 0.0


Piece: TypeAlias = "tuple[Callable[..., None], tuple[Any, ...]]"


class Transfer:
    """Base of reading and writing.

    Invariants, under `_lock`: `_pending` counts the pieces not finished, plus one while the caller still adds; the
    descriptors are closed by whoever takes it to 0, so never under a thread that uses them. After `_closed` was set and
    `_leave_all` returned nobody touches the caller's memory: a thread is `inside` before it looks at `_closed`.
    """

    def __init__(
        self, pool: Pool, live: set[Transfer], fds_closed: Callable[[], None], slow_threads: int
    ) -> None:
        """`live` has this transfer while it owns descriptors; `fds_closed` is called when they are closed.

        Slow work begins with `slow_threads`, and gets one more for each that turns out to wait.
        """
        self._slow_threads = min(slow_threads, pool.size)
        self._pool, self._live, self._fds_closed = pool, live, fds_closed
        live.add(self)
        self._ready: deque[Piece] = deque()
        self._slow: deque[Piece] = deque()
        self._fds: list[list[int]] = []
        self._seats: list[Seat] = []
        self._helpers = 0
        self._pending = 1
        self._adding = True
        self._closed = False
        self._lock = threading.Lock()
        self._done = threading.Lock()
        self._done.acquire()

    def own(self, fds: list[int]) -> None:
        """Take over descriptors, to be closed when all work is done."""
        self._fds.append(fds)

    def add(self, pieces: list[Piece], slow: bool = False) -> None:
        """Queue work and call helpers for it."""
        if not pieces:
            return
        with self._lock:
            self._pending += len(pieces)
            (self._slow if slow else self._ready).extend(pieces)
            # Ready work keeps processors busy: more threads than those only wait for each other, and the caller is one.
            wanted = min(len(self._slow), self._slow_threads) or min(OTHERS, len(self._ready) - 1)
            calls = max(0, min(wanted, self._pool.size) - self._helpers)
            self._helpers += calls
        for _ in range(calls):
            self._pool.submit(self._help)

    def _add_thread(self) -> None:
        """Have one more thread take what nobody has begun."""
        with self._lock:
            if not self._slow or self._helpers >= self._pool.size:
                return
            self._helpers += 1
        self._pool.submit(self._help)

    def finish(self, deadline: Deadline) -> bool:
        """Help, then wait until all is done; False if the deadline passed first: nothing moves after that."""
        seat = self._sit_down()
        while not deadline.passed() and self._step(self._ready, seat):
            pass
        self._added()
        if self._done.acquire(timeout=deadline.lock_seconds()):
            return True
        self.stop()
        return False

    def stop(self) -> None:
        """Give up: drop what nobody has begun, and return once nobody touches the caller's memory."""
        with self._lock:
            self._closed = True
            dropped = len(self._ready) + len(self._slow)
            self._ready.clear()
            self._slow.clear()
            self._pending -= dropped
            over = dropped > 0 and self._pending == 0
        if over:
            self._end()
        self._leave_all()

    def _has_ended(self) -> bool:
        """`_closed`, where a type checker would believe what it read before."""
        return self._closed

    def abort(self) -> None:
        """`stop` for a caller that did not come to the end of `finish`."""
        self.stop()
        self._added()

    def _added(self) -> None:
        if self._adding:
            self._adding = False
            self._finish_one()

    def _sit_down(self) -> Seat:
        seat = Seat()
        self._seats.append(seat)
        return seat

    def _leave_all(self) -> None:
        for seat in list(self._seats):
            while seat.inside:  # a copy of at most RANGE_BYTES
                time.sleep(0.0002)

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

    def _step(self, queue: deque[Piece], seat: Seat) -> bool:
        try:
            run, args = queue.popleft()
        except IndexError:
            return False
        try:
            run(seat, *args)
        finally:
            seat.inside = False
            self._finish_one()
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

    def _finish_one(self) -> None:
        with self._lock:
            self._pending -= 1
            if self._pending:
                return
        self._end()

    def forget(self) -> None:
        """In a forked child: close its copies of the descriptors, or they keep objects from being reused."""
        for fds in self._fds:
            close_fds(fds)

    def _end(self) -> None:
        self._live.discard(
            self
        )  # first: a child forked from here on must not close what may be others' by then
        try:
            for fds in self._fds:
                close_fds(fds)
        finally:
            self._fds_closed()
            self._done.release()


def queued_seconds() -> float:
    """How long this thread has been ready to run without a processor, since it began; 0 if the kernel doesn't count it.

    The second number of schedstat (Documentation/scheduler/sched-stats.rst).
    """
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def group(sizes: list[int], small: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Cut positions into runs of about TASK_BYTES, and name the positions over `small` bytes, which are in no run."""
    count = len(sizes)
    if not count:
        return [], []
    if max(sizes) <= small:
        step = max(1, TASK_BYTES * count // sum(sizes))
        return [(first, min(first + step, count)) for first in range(0, count, step)], []
    large = [i for i, size in enumerate(sizes) if size > small]
    return [(i, i + 1) for i, size in enumerate(sizes) if size <= small], large


def ranges(size: int) -> list[tuple[int, int]]:
    return [(at, min(at + RANGE_BYTES, size)) for at in range(0, size, RANGE_BYTES)]
