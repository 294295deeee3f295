"""The bytes of one part of a batch: what is to be moved, whose descriptors those are, and when it is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvcsfs.sdk.connection import close_fds
from kvcsfs.sdk.crew import Crew, Piece
from kvcsfs.sdk.deadline import Deadline

TASK_BYTES = (
    1 << 20
)  # small values are grouped to about this; less costs more in hand-overs than it gains in balance
RANGE_BYTES = 8 << 20  # large ones are cut; no step inside the caller's memory takes longer than copying this
WHOLE_BYTES = (
    64 << 20
)  # up to here a hashed value is one piece of work: hashing beside the transfer is cheaper
IOV_MAX = 1024  # of one preadv or pwritev, sysconf(_SC_IOV_MAX)

PENDING = -(1 << 31)  # status of a key that nobody has answered yet


class Transfer:
    """Base of reading and writing.

    Invariants, under `_lock`: `_pending` counts the pieces not finished, plus one while the caller still adds; the
    descriptors are closed by whoever takes it to 0, so never under a thread that uses them. After `_closed` was set and
    the crew left nobody touches the caller's memory: a thread is `inside` before it looks at `_closed`.
    """

    def __init__(self, crew: Crew, live: set[Transfer], fds_closed: Callable[[], None]) -> None:
        """`live` has this transfer while it owns descriptors; `fds_closed` is called when they are closed."""
        self._crew, self._live, self._fds_closed = crew, live, fds_closed
        live.add(self)
        self._fds: list[list[int]] = []
        self._pending = 1
        self._adding = True
        self._closed = False
        self._lock = threading.Lock()
        self._done = threading.Lock()
        self._done.acquire()

    def own(self, fds: list[int]) -> None:
        """Take over descriptors, to be closed when all work is done."""
        self._fds.append(fds)

    def add(self, pieces: Sequence[Piece], slow: bool = False) -> None:
        """Queue work and call helpers for it."""
        if not pieces:
            return
        with self._lock:
            self._pending += len(pieces)
        self._crew.add(self, pieces, slow)

    def added(self) -> None:
        """The caller adds nothing more."""
        if self._adding:
            self._adding = False
            self.finish_one()

    def finish(self, deadline: Deadline) -> bool:
        """Help, then wait until all is done; False if the deadline passed first: nothing moves after that."""
        self._crew.help_out(deadline)
        self.added()
        if self._done.acquire(timeout=deadline.lock_seconds()):
            return True
        self.stop()
        return False

    def stop(self) -> None:
        """Give up: drop what nobody has begun, and return once nobody touches the caller's memory."""
        with self._lock:
            self._closed = True
        dropped = self._crew.drop(self)
        with self._lock:
            self._pending -= dropped
            over = dropped > 0 and self._pending == 0
        if over:
            self._end()
        self._crew.leave()

    def _has_ended(self) -> bool:
        """`_closed`, where a type checker would believe what it read before."""
        return self._closed

    def abort(self) -> None:
        """`stop` for a caller that did not come to the end of `finish`."""
        self.stop()
        self.added()

    def finish_one(self) -> None:
        """A piece is done, or was given up."""
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
