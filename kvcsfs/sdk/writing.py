"""Values from the caller's memory into reserved objects, hashed on the way."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence

from xxhash import xxh3_128

from kvcsfs import wire
from kvcsfs.sdk.buffers import Source, cut, digest_of, size_of, views_of
from kvcsfs.sdk.crew import PROCESSORS, Crew, Piece, Seat
from kvcsfs.sdk.transfer import IOV_MAX, PENDING, WHOLE_BYTES, Transfer, group, ranges
from kvcsfs.sdk.workers import CHUNK_BYTES, Pool, bounce_buffer

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


class Slots:
    """What one reply frame reserved: columns, position j of each belongs to one key.

    Writing fills `digests` and `statuses`: 0 written, -errno, or PENDING still.
    """

    __slots__ = ("digests", "fds", "left", "places", "sources", "statuses", "tokens")

    def __init__(
        self, places: Sequence[int], tokens: list[int], fds: list[int], sources: list[Source]
    ) -> None:
        self.places, self.tokens, self.fds, self.sources = places, tokens, fds, sources
        self.digests: list[bytes] = [b""] * len(tokens)
        self.statuses = [PENDING] * len(tokens)
        self.left: dict[int, int] = {}  # pieces not finished of a value that is cut up


class Writing(Transfer):
    """A write may wait for a disk, so it's work for workers alone, except where the file system lives in memory."""

    def __init__(
        self,
        crew: Crew,
        live: set[Transfer],
        fds_closed: Callable[[], None],
        point: wire.MountpointInfo,
    ) -> None:
        super().__init__(crew, live, fds_closed)
        self._waits = not point.in_memory
        self._align = point.align  # > 0: direct I/O
        self.slots: list[Slots] = []

    def take(self, slots: Slots) -> None:
        """Queue the slots of one frame, whose descriptors are owned already."""
        self.slots.append(slots)
        runs, large = group([size_of(source) for source in slots.sources], WHOLE_BYTES)
        pieces: list[Piece] = [(self._write_run, (slots, first, end)) for first, end in runs]
        for j in large:
            pieces += self._cut_up(slots, j)
        self.add(pieces, slow=self._waits)

    def _cut_up(self, slots: Slots, j: int) -> list[Piece]:
        views = views_of(slots.sources[j])
        parts = ranges(sum(map(len, views)))
        slots.left[j] = len(parts) + 1
        pieces: list[Piece] = [(self._write_range, (slots, j, views, start, end)) for start, end in parts]
        return [(self._hash_all, (slots, j, views)), *pieces]

    def _write_run(self, _seat: Seat, slots: Slots, first: int, end: int) -> None:
        pwritev, fds = os.pwritev, slots.fds
        sources, digests, statuses = slots.sources, slots.digests, slots.statuses
        for j in range(first, end):
            if self._closed:
                return
            source = sources[j]
            parts = source if isinstance(source, list) else (source,)
            size = size_of(source)
            try:
                if (
                    size <= CHUNK_BYTES
                    and not self._align
                    and len(parts) <= IOV_MAX
                    and pwritev(fds[j], parts, 0) == size
                ):
                    digests[j] = digest_of(source)
                    statuses[j] = 0
                    continue
                written = self._write_steps(slots, j)
            except OSError as exc:
                statuses[j] = _status(exc)
            else:
                if written:
                    statuses[j] = 0

    def _write_steps(self, slots: Slots, j: int) -> bool:
        """Write one value in steps, hashing each while it is in the processor's cache; False if the call gave up."""
        views, hasher = views_of(slots.sources[j]), xxh3_128()
        if not self._push(slots.fds[j], views, 0, sum(map(len, views)), hasher):
            return False
        slots.digests[j] = hasher.digest()
        return True

    def _push(self, fd: int, views: list[memoryview], at: int, end: int, hasher: xxh3_128 | None) -> bool:
        single = views[0] if len(views) == 1 else None
        limit = (
            sys.maxsize if self._align else IOV_MAX
        )  # direct I/O needs whole steps; it copies what a call can't take
        while at < end:
            if self._closed:
                return False
            size = min(CHUNK_BYTES, end - at)
            parts = [single[at : at + size]] if single is not None else cut(views, at, size, limit)
            n = self._write_direct(fd, parts, at) if self._align else os.pwritev(fd, parts, at)
            if hasher is not None:
                for part in parts if n == size else cut(parts, 0, n):
                    hasher.update(part)
            at += n
        return True

    def _write_direct(self, fd: int, parts: list[memoryview], at: int) -> int:
        """Write one step: memory that is aligned as it is, other by way of this thread's own, filled up with zeros."""
        size = sum(map(len, parts))
        if not size % self._align:
            try:
                return os.pwritev(fd, parts, at)
            except OSError as exc:
                if exc.errno != errno.EINVAL:
                    raise
        bounce, padded = bounce_buffer(), -(-size // self._align) * self._align
        done = 0
        for part in parts:
            bounce[done : done + len(part)] = part
            done += len(part)
        bounce[size:padded] = bytes(padded - size)
        return min(size, os.pwritev(fd, (bounce[:padded],), at))

    def _write_range(
        self, _seat: Seat, slots: Slots, j: int, views: list[memoryview], start: int, end: int
    ) -> None:
        try:
            if self._push(slots.fds[j], views, start, end, None):
                self._part_done(slots, j)
        except OSError as exc:
            slots.statuses[j] = _status(exc)

    def _hash_all(self, _seat: Seat, slots: Slots, j: int, views: list[memoryview]) -> None:
        hasher = xxh3_128()
        for view in views:
            for at in range(0, len(view), CHUNK_BYTES):
                if self._closed:
                    return
                hasher.update(view[at : at + CHUNK_BYTES])
        slots.digests[j] = hasher.digest()
        self._part_done(slots, j)

    def _part_done(self, slots: Slots, j: int) -> None:
        with self._lock:
            slots.left[j] -= 1
            done = slots.left[j] == 0
        if done:
            slots.statuses[j] = 0


def writers(pool: Pool, point: wire.MountpointInfo) -> Crew:
    """The crew for all parts of one put.

    Writes into the page cache keep processors busy: with more threads than those the bytes to be hashed are gone
    from the processor's cache, and small values wait for the interpreter lock.
    """
    return Crew(pool, pool.size if point.align else PROCESSORS)


def _status(exc: OSError) -> int:
    return -errno.ENOSPC if exc.errno in _NO_ROOM else -errno.EIO
