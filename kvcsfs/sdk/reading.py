"""Values from descriptors into memory, verified on the way if asked.

How the caller's memory stays its own after a deadline: it is only read into by calls that never wait for a disk
(RWF_NOWAIT, or any read where the file system lives in memory). The rest goes through a chunk of the worker's own,
copied while the call still waits.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

from xxhash import xxh3_128

from kvcsfs import wire
from kvcsfs.sdk.buffers import Pages, Target, cut, digest_of, size_of, uninitialised, views_of
from kvcsfs.sdk.crew import Crew, Piece, Seat
from kvcsfs.sdk.transfer import IOV_MAX, RANGE_BYTES, WHOLE_BYTES, Transfer, group, ranges
from kvcsfs.sdk.workers import CHUNK_BYTES, Pool, bounce_buffer


class Hits:
    """What one reply frame found, in columns: position j of each belongs to hit j, `places[j]` in the results."""

    __slots__ = ("checksums", "fds", "places", "sizes", "targets", "verify")

    def __init__(
        self,
        places: Sequence[int],
        sizes: list[int],
        fds: list[int],
        targets: Sequence[Target] | None,
        checksums: bytes,
        verify: bool,
    ) -> None:
        """`targets` None: memory is allocated. `checksums`: 16 bytes a hit."""
        self.places, self.sizes, self.fds, self.targets = places, sizes, fds, targets
        self.checksums, self.verify = checksums, verify

    def checksum(self, j: int) -> bytes:
        return self.checksums[wire.CHECKSUM_BYTES * j : wire.CHECKSUM_BYTES * (j + 1)]


class Value:
    """One value that takes more than one step, with the memory it goes to. Fields change under the transfer's lock."""

    __slots__ = ("arrived", "broken", "hashed", "hasher", "hashing", "hits", "j", "views")

    def __init__(
        self, hits: Hits, j: int, views: list[memoryview], hasher: xxh3_128 | None, done: int
    ) -> None:
        """`hasher` None: not verified. The first `done` bytes are there, and hashed."""
        self.hits, self.j, self.views, self.hasher = hits, j, views, hasher
        self.arrived: dict[int, int] = {}  # ranges that are there and not hashed: start -> end
        self.hashed = done  # all before it is there, and in the hasher if there is one
        self.hashing = False
        self.broken = False  # answered with a failure; what else arrives is of no use


class Reading(Transfer):
    """Fills `statuses` (and `data`, when memory is allocated) at the hits' places: sizes, 0 or -errno.

    `needed` has the sizes of values that did not fit. `wrong` collects the places whose bytes failed their checksum or
    ended early; their status is 0.
    """

    def __init__(
        self,
        pool: Pool,
        live: set[Transfer],
        fds_closed: Callable[[], None],
        statuses: list[int],
        data: list[bytearray | None],
        point: wire.MountpointInfo,
    ) -> None:
        super().__init__(Crew(pool, pool.size), live, fds_closed)
        self.statuses, self.data = statuses, data
        self.wrong: list[int] = []
        self.needed: dict[int, int] = {}
        self._flags = 0 if point.in_memory else os.RWF_NOWAIT
        self._direct = point.align > 0  # then plain memory won't do: everything goes through aligned chunks
        self._align = max(1, point.align)

    def take(self, hits: Hits) -> None:
        """Queue the hits of one frame, whose descriptors are owned already."""
        whole = WHOLE_BYTES if hits.verify else RANGE_BYTES
        runs, large = group(hits.sizes, whole)
        pieces: list[Piece] = [(self._read_run, (hits, first, end)) for first, end in runs]
        for j in large:
            pieces += self._cut_up(hits, j)
        self.add(pieces)

    def _cut_up(self, hits: Hits, j: int) -> list[Piece]:
        views = self._views(hits, j)
        if views is None:
            return []
        value = Value(hits, j, views, xxh3_128() if hits.verify else None, 0)
        return [(self._read_range, (value, start, end)) for start, end in ranges(hits.sizes[j])]

    # -- what never waits

    def _read_run(self, seat: Seat, hits: Hits, first: int, end: int) -> None:
        """Read values `first` .. `end - 1` of the hits. The hot loop: per key one system call and little else."""
        preadv, flags, verify = os.preadv, self._flags, hits.verify
        sizes, fds, places, statuses, checksums = (
            hits.sizes,
            hits.fds,
            hits.places,
            self.statuses,
            hits.checksums,
        )
        targets, data, step = hits.targets, self.data, CHUNK_BYTES if verify else RANGE_BYTES
        seat.inside = True  # before the look at `_closed`
        for j in range(first, end):
            if self._closed:
                return
            size = sizes[j]
            target: Target
            if targets is None:
                target = data[places[j]] = uninitialised(size)
            else:
                target = targets[j]
            room = size_of(target)
            parts = target if isinstance(target, list) else (target,)
            if size > step or self._direct or room < size or len(parts) > IOV_MAX:
                self._read_steps(hits, j, step)
                continue
            if room > size:
                target = parts = cut(views_of(target), 0, size)
            try:
                n = preadv(fds[j], parts, 0, flags)
            except OSError:  # EAGAIN: not cached; EOPNOTSUPP: the file system can't tell
                n = 0
            if n != size:
                self._read_later(hits, j, views_of(target), xxh3_128() if verify else None, 0)
            elif verify and digest_of(target) != checksums[16 * j : 16 * j + 16]:
                self._miss(hits, j)
            else:
                statuses[places[j]] = size

    def _views(self, hits: Hits, j: int) -> list[memoryview] | None:
        """The memory of hit j, cut to its size; None if it is too small, which is answered here."""
        size, place = hits.sizes[j], hits.places[j]
        if hits.targets is None:
            data = self.data[place]
            if data is None:
                data = self.data[place] = uninitialised(size)
            return [memoryview(data)]
        target = hits.targets[j]
        if size_of(target) < size:
            self.statuses[place] = -errno.ENOSPC
            self.needed[place] = size
            return None
        return cut(views_of(target), 0, size)

    def _read_steps(self, hits: Hits, j: int, step: int) -> None:
        """Read one value in steps, hashing each while it is in the processor's cache."""
        views = self._views(hits, j)
        if views is None:
            return
        size, hasher = hits.sizes[j], xxh3_128() if hits.verify else None
        at = 0 if self._direct else self._pull(hits.fds[j], views, 0, size, step, hasher)
        if at < size:
            if not self._closed:
                self._read_later(hits, j, views, hasher, at)
        elif hasher is not None and hasher.digest() != hits.checksum(j):
            self._miss(hits, j)
        else:
            self.statuses[hits.places[j]] = size

    def _pull(
        self, fd: int, views: list[memoryview], at: int, end: int, step: int, hasher: xxh3_128 | None
    ) -> int:
        """Read from `at` to `end` as far as it goes without waiting; return how far that was."""
        single = views[0] if len(views) == 1 else None
        while at < end and not self._closed:
            size = min(step, end - at)
            parts = [single[at : at + size]] if single is not None else cut(views, at, size, IOV_MAX)
            try:
                n = os.preadv(fd, parts, at, self._flags)
            except OSError:
                return at
            if n == 0:
                return at
            if hasher is not None:
                for part in parts if n == size else cut(parts, 0, n):
                    hasher.update(part)
            at += n
        return at

    def _read_range(self, seat: Seat, value: Value, start: int, end: int) -> None:
        seat.inside = True
        fd = value.hits.fds[value.j]
        at = start if self._direct else self._pull(fd, value.views, start, end, RANGE_BYTES, None)
        if at > start:
            self._arrived(value, start, at)
        if at < end and not self._closed:
            self.add([(self._wait_for, (value, at, end))], slow=True)

    # -- what may wait for a disk

    def _read_later(
        self, hits: Hits, j: int, views: list[memoryview], hasher: xxh3_128 | None, at: int
    ) -> None:
        value = Value(hits, j, views, hasher, at)
        self.add([(self._wait_for, (value, at, hits.sizes[j]))], slow=True)

    def _wait_for(self, seat: Seat, value: Value, start: int, end: int) -> None:
        """Read a range: into a pool's buffer as it is, else chunk by chunk into this thread's own memory."""
        pages = value.views[0].obj if len(value.views) == 1 else None
        if self._direct and isinstance(pages, Pages):
            with pages.pool.use(pages):
                start = self._read_direct(value, start, end)
        if start < end:
            self._read_copying(seat, value, start, end)

    def _read_direct(self, value: Value, at: int, end: int) -> int:
        """Read whole blocks into memory that its pool keeps out of use meanwhile; return how far that went."""
        view, fd = value.views[0], value.hits.fds[value.j]
        while not self._closed and not value.broken:
            size = min(RANGE_BYTES, end - at)
            size -= size % self._align
            try:
                n = os.preadv(fd, (view[at : at + size],), at) if size else 0
            except (
                OSError
            ):  # EINVAL: this part of the buffer isn't aligned; anything else shows again in the copy
                return at
            if not n or self._closed:
                return at
            self._arrived(value, at, at + n)
            at += n
            if n % self._align:
                return at
        return at

    def _read_copying(self, seat: Seat, value: Value, start: int, end: int) -> None:
        """Read chunk by chunk into this thread's own memory, and copy each while the call still waits."""
        bounce, fd, at = bounce_buffer(), value.hits.fds[value.j], start
        while at < end and not self._closed and not value.broken:
            skip = at % self._align  # direct I/O wants offsets in blocks
            try:
                n = os.preadv(fd, (bounce,), at - skip) - skip
            except OSError:
                self._fail(value, -errno.EIO)
                return
            if n <= 0:
                self._fail(value, 0)
                return
            n = min(n, end - at)
            seat.inside = True
            if self._has_ended():
                return
            done = skip
            for part in cut(value.views, at, n):
                part[:] = bounce[done : done + len(part)]
                done += len(part)
            self._arrived(value, at, at + n)
            seat.inside = False
            at += n

    def _fail(self, value: Value, status: int) -> None:
        with self._lock:
            broken, value.broken = value.broken, True
        if broken or self._closed:
            return
        if status:
            self.statuses[value.hits.places[value.j]] = status
        else:
            self._miss(value.hits, value.j)

    def _miss(self, hits: Hits, j: int) -> None:
        self.statuses[hits.places[j]] = 0
        self.wrong.append(hits.places[j])

    def _arrived(self, value: Value, start: int, end: int) -> None:
        """Note a range; one thread at a time hashes what has become contiguous, in order. The last answers."""
        with self._lock:
            value.arrived[start] = end
            if value.hashing:
                return
            value.hashing = True
        size = value.hits.sizes[value.j]
        while True:
            with self._lock:
                stop = value.arrived.pop(value.hashed, None)
                if stop is None or self._closed:
                    value.hashing = False
                    break
            if value.hasher is not None:
                for part in cut(value.views, value.hashed, stop - value.hashed):
                    value.hasher.update(part)
            value.hashed = stop
        if value.hashed == size and not self._closed and not value.broken:
            self._answer(value)

    def _answer(self, value: Value) -> None:
        hits, j = value.hits, value.j
        if value.hasher is not None and value.hasher.digest() != hits.checksum(j):
            self._fail(value, 0)
        else:
            self.statuses[hits.places[j]] = hits.sizes[j]
