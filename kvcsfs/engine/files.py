"""Files: values of unknown size, which the daemon writes itself into a staged file that grows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcsfs.engine import jobs
from kvcsfs.engine.entry import BLOCK, Entry, charge, flags_of
from kvcsfs.engine.session import Staged
from kvcsfs.errors import CapacityError, KvcsError

if TYPE_CHECKING:
    from kvcsfs.engine.volume import Volume


class Files:
    """The files of a volume that grow."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._room, self._writes = volume.room, volume.writes
        self._lane, self._store = volume.lane, volume.store

    async def stage(self, key: str, likely: int = 0) -> Staged:
        """A staged file that grows; `fd` reads and writes it. One of a `likely` size may take a slot of that size."""
        self._volume.check_ready()
        if likely and (staged := await self._stage_likely(key, likely)):
            return staged
        await self._room.reserve(charge(0))
        try:
            slot, fd = await self._lane.run(jobs.create_file, self._store)
        except KvcsError:
            self._volume.catalog.unreserve(charge(0))
            raise
        return Staged(self._volume, Entry(key, slot, 0, b"", 0, 0.0, flags_of(key)), fd)

    async def _stage_likely(self, key: str, size: int) -> Staged | None:
        """A slot to be written again for a file that will probably have this size; what is in it is void."""
        plan = self._volume.catalog.promise([charge(size)], [key])
        if plan.refused:
            return None
        with self._volume.leaving(plan.recycle.values()):
            (outcome,) = await self._writes.stage(plan, [charge(size)], await self._room.make(plan))
        if isinstance(outcome, tuple):
            (outcome,) = await self._lane.brief(jobs.own_many, [outcome])
        if isinstance(outcome, tuple):
            slot, fd = outcome
            return Staged(self._volume, Entry(key, slot, size, b"", 0, 0.0, flags_of(key)), fd)
        self._volume.catalog.unreserve(charge(size))
        self._room.keep_stuck([*plan.recycle.values()])
        return None

    async def grow(self, staged: Staged, size: int) -> None:
        """Reserve for at least `size` bytes, doubling to keep the steps few. Raises CapacityError; nothing changes."""
        have = staged.charged
        if charge(size) <= have:
            return
        for wanted in (max(size, 2 * staged.entry.size, 16 * BLOCK), size):
            extra = charge(wanted) - have
            try:
                await self._room.reserve(extra)
            except CapacityError:
                if wanted == size:
                    raise
                continue
            if failed := await self._grow_file(staged.fd, have + extra, extra):
                self._volume.catalog.unreserve(extra)
                if wanted == size:
                    raise failed
                continue
            staged.entry.resize(wanted)
            return

    async def _grow_file(self, fd: int, size: int, extra: int) -> KvcsError | None:
        """Take a file's blocks; if the file system has no room evict as much, and try once more."""
        failed = await self._lane.run(jobs.grow_file, fd, size)
        if isinstance(failed, CapacityError):
            await self._room.make(self._volume.catalog.shed(extra))
            failed = await self._lane.run(jobs.grow_file, fd, size)
        return failed

    async def publish(self, staged: Staged, name: str, size: int, checksum: bytes | None, hold: bool) -> None:
        """Make a grown file the value of `name`; closes `fd`. With `hold` its entry stays pinned.

        `checksum` None: read it again. Raises what made it fail; then the file is gone, and the key as it was.
        """
        entry = staged.entry
        try:
            await self._finish(staged, size, checksum)
        except KvcsError:
            await self._writes.abort([staged])
            raise
        entry.rename(name)
        self._volume.catalog.pin([entry])
        (failed,) = await self._writes.commit([staged])
        if failed or not hold:
            self._volume.release([entry])
        if failed:
            raise failed

    async def _finish(self, staged: Staged, size: int, checksum: bytes | None) -> None:
        """Cut a grown file to its size, give the rest of its reservation back, and set its checksum; closes `fd`."""
        if checksum is None:
            checksum = await self._lane.run(jobs.finish_file, staged.fd, size, None)
        else:
            (checksum,) = await self._lane.brief(jobs.finish_many, [staged.fd], [size], [checksum])
        staged.entry.checksum = checksum
        self._volume.catalog.unreserve(staged.charged - charge(size))
        staged.entry.resize(size)

    async def drop(self, staged: Staged) -> None:
        """Close and abort a grown file."""
        await self._lane.run(jobs.close_all, [staged.fd])
        await self._writes.abort([staged])
