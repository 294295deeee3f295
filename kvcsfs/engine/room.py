"""Room: how one mountpoint gets and keeps room: eviction, reclaim, free slots, and what can't be removed.

A put makes room for itself, as its plan says. Two background tasks see that it seldom must: one evicts between two
watermarks, the other reclaims what readers let go.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import trio

from kvcsfs.config import MountpointConfig
from kvcsfs.engine import jobs
from kvcsfs.engine.catalog import FREE_SLOTS_SHARE, FreeSlot, Plan
from kvcsfs.engine.entry import Entry
from kvcsfs.errors import BackingError, CapacityError

if TYPE_CHECKING:
    from kvcsfs.engine.volume import Volume

EVICT_BATCH = 64  # victims of one background trip; a put waits for no more than that
RETRY_SECONDS = 5.0
HELD_SLOTS = 512  # free slots that keep a descriptor, as far as there are enough


class Room:
    """The room of a volume. `descriptor_limit` bounds the descriptors that it may keep open in all.

    What is set in `loose` wakes the reclaim of what nobody holds any more.
    """

    def __init__(self, volume: Volume, descriptor_limit: int) -> None:
        self._volume = volume
        self._lane, self._store, self._counters = volume.lane, volume.store, volume.counters
        self._reclaiming: set[Entry] = set()
        self._hold_limit = min(HELD_SLOTS, descriptor_limit // 4)
        self._keeping = 0  # bytes on the way to be free slots
        self._regrouped = False  # free slots are from other access domains
        self._low = trio.Event()
        self.loose = trio.Event()

    # -- for a put

    async def make(self, plan: Plan) -> int:
        """Do what a plan needs before its files can be had; returns how many of its bytes could not be freed.

        The caller keeps what is to be recycled `leaving`.
        """
        stuck: list[Entry] = []
        victims = plan.victims
        self._count_evicted(victims)
        with self._volume.leaving(plan.unlink):
            await self._volume.close_fds(self._volume.descriptors.take(victims))
            if plan.unlink or plan.drop:
                stuck = await self._lane.run(jobs.make_room, self._store, plan)
                self.keep_stuck(stuck)
        self.wake()
        return sum(victim.charged for victim in stuck)

    async def reserve(self, size: int) -> None:
        """Reserve bytes without a file. Raises CapacityError, BackingError; then nothing is reserved."""
        catalog = self._volume.catalog
        plan = catalog.promise([size], files=False)
        missing = await self.make(plan)
        if plan.refused:
            raise self.refusal(size)
        if missing:
            await self.make(catalog.shed(missing))
        if catalog.ledger.free < 0:
            catalog.unreserve(size)
            raise unremovable()

    def refusal(self, size: int) -> CapacityError:
        """Why so many bytes can't be had."""
        catalog = self._volume.catalog
        can = max(catalog.obtainable, 0)
        return CapacityError(f"need {size} B, {can} B can be had, readers hold {catalog.pinned} B")

    def keep_stuck(self, victims: Collection[Entry]) -> None:
        """Victims whose files can't be removed stay counted, and are tried again later."""
        self._counters["io_errors"] += len(victims)
        self._volume.catalog.keep_stuck(victims)

    # -- reclaim

    async def reclaim(self, entries: Sequence[Entry]) -> dict[Entry, OSError]:
        """Make free slots of retired entries that nobody holds, as many as may be kept; unlink the others.

        Returns those that could not be removed; they stay retired and are tried again.
        """
        catalog = self._volume.catalog
        entries = [e for e in entries if e not in self._reclaiming and e in catalog.retired]
        if not entries:
            return {}
        self._reclaiming.update(entries)
        limit = catalog.ledger.capacity // FREE_SLOTS_SHARE
        kept: list[Entry] = []
        others: list[Entry] = []
        before = total = catalog.ledger.free_slots + self._keeping
        for entry in entries:
            fits = total + entry.charged <= limit
            total += entry.charged * fits
            (kept if fits else others).append(entry)
        self._keeping += total - before
        stuck: dict[Entry, OSError] = {}
        try:
            await self._volume.close_fds(self._volume.descriptors.take(entries))
            if kept:
                holds = self._holds(len(kept))
                stuck |= self._book(kept, await self._lane.brief(jobs.recycle_many, kept, holds))
            if others:
                stuck |= self._book(others, await self._lane.run(jobs.unlink_many, self._store, others))
        finally:
            self._reclaiming.difference_update(entries)
            self._keeping -= total - before
        return stuck

    def _holds(self, count: int) -> list[bool]:
        """Which of so many new free slots keep their descriptor."""
        held = sum(s.fd >= 0 for s in self._volume.catalog.free_slots())
        left = self._hold_limit - held - len(self._reclaiming)
        return [i < left for i in range(count)]

    def _book(
        self, entries: Sequence[Entry], outcomes: Sequence[FreeSlot | OSError | None]
    ) -> dict[Entry, OSError]:
        stuck: dict[Entry, OSError] = {}
        for entry, outcome in zip(entries, outcomes, strict=True):
            if isinstance(outcome, OSError):
                stuck[entry] = outcome
            else:
                self._volume.catalog.reclaimed(entry, outcome)
        self._counters["io_errors"] += len(stuck)
        return stuck

    async def reclaim_unheld(self) -> dict[Entry, OSError]:
        """Reclaim all that nobody holds any more."""
        return await self.reclaim([e for e in self._volume.catalog.retired if not e.pins])

    async def reclaim_loose(self) -> None:
        """Background: reclaim what readers let go, and try again what could not be removed."""
        while True:
            with trio.move_on_after(RETRY_SECONDS):
                await self.loose.wait()
            self.loose = trio.Event()
            await self.reclaim_unheld()

    async def discard(self, entries: Collection[Entry], in_place: bool = False) -> dict[Entry, OSError]:
        """Void and reclaim entries that just left the index; returns those that would come back after a crash.

        What is still held is voided now and reclaimed later, as is everything with `in_place`.
        """
        catalog = self._volume.catalog
        held = [e for e in entries if e.pins or in_place]
        failed: dict[Entry, OSError] = {}
        with self._volume.leaving(entries):
            if held:
                catalog.pin(entries)  # all: a reclaim in the background would not be waited for
                outcomes = await self._lane.brief(jobs.void_many, held)
                failed = {e: exc for e, exc in zip(held, outcomes, strict=True) if exc}
                self._counters["io_errors"] += len(failed)
                catalog.unpin(entries)
            stuck = await self.reclaim([e for e in entries if not e.pins])
        return {e: exc for e, exc in {**failed, **stuck}.items() if e in catalog.retired}

    # -- eviction

    async def evict(self, prefix: str, target: int) -> tuple[int, int]:
        """Evict entries below `prefix`, least recently used first, until `target` bytes went; 0 for all."""
        self._volume.check_ready()
        count = freed = 0
        victims = [e for e in self._volume.catalog.victims() if e.key.startswith(prefix)]
        for start in range(0, len(victims), EVICT_BATCH):
            batch: list[Entry] = []
            for entry in victims[start : start + EVICT_BATCH]:
                if entry.live and not entry.pins and (not target or freed < target):
                    batch.append(entry)
                    freed += entry.charged
            count += len(batch)
            await self._evict(batch)
        return count, freed

    async def _evict(self, batch: list[Entry]) -> None:
        for entry in batch:
            self._volume.catalog.remove(entry)
        self._count_evicted(batch)
        await self.discard(batch)

    def _count_evicted(self, victims: Collection[Entry]) -> None:
        if victims:
            self._counters["evictions"] += len(victims)
            self._counters["evicted_bytes"] += sum(v.charged for v in victims)
            self._volume.changed([v.key for v in victims])

    # -- between the watermarks

    def wake(self) -> None:
        """Have the background make room, if less than the low watermark is left."""
        catalog = self._volume.catalog
        if catalog.room < catalog.ledger.capacity * self._volume.config.low_watermark:
            self._low.set()

    def resize(self, config: MountpointConfig) -> None:
        """Take another capacity and other watermarks. What doesn't fit any more is evicted in the background."""
        self._volume.config = config
        self._volume.catalog.ledger.capacity = config.capacity
        self._low.set()

    def access_changed(self) -> None:
        """The access domains are others now."""
        self._regrouped = True
        self._low.set()

    async def keep(self) -> None:
        """Background: when less than the low watermark is free, evict up to the high one."""
        while True:
            await self._low.wait()
            self._low = trio.Event()
            if self._regrouped:
                self._regrouped = False
                await self.drop_free()
            if not self._volume.recovering:
                await self.clear(self._volume.catalog.ledger.capacity * self._volume.config.high_watermark)

    async def clear(self, goal: float) -> None:
        """Evict until `goal` bytes can be had without an eviction; then bring the files within the capacity."""
        catalog = self._volume.catalog
        while batch := self._oldest(goal - catalog.room):
            before = catalog.room
            await self._evict(batch)
            if catalog.room <= before:  # files can't be removed: going on would empty the store
                break
        while catalog.ledger.free < 0 and (free := catalog.drop_free()):
            await self._lane.run(jobs.drop, self._store, free)

    async def drop_free(self) -> None:
        """Give up every free slot: of which access domain it is isn't known, as after a start, or has changed."""
        while free := self._volume.catalog.drop_free():
            await self._lane.run(jobs.drop, self._store, free)

    def _oldest(self, missing: float) -> list[Entry]:
        """The next victims for `missing` bytes, a batch at most."""
        batch: list[Entry] = []
        for entry in self._volume.catalog.victims():
            if missing <= 0 or len(batch) == EVICT_BATCH:
                break
            batch.append(entry)
            missing -= entry.charged
        return batch


def unremovable() -> BackingError:
    """Why bytes that were promised can't be used: what was evicted for them is still on disk."""
    return BackingError("an evicted object can't be removed")
