"""Volume: one mountpoint's catalog and files, and the steps that move both together.

A step changes the catalog, goes to a worker thread once for its file work, and changes the catalog again. It is
shielded: what has begun completes, whoever waits for it. Between its two changes other steps run, so an entry is
pinned by every step that still needs its file, and `_claim` lets one commit, rename or delete at a time touch a key.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from kvcsfs.config import MountpointConfig
from kvcsfs.engine import jobs, recovery
from kvcsfs.engine.access import Access
from kvcsfs.engine.catalog import FREE_SLOTS_SHARE, Catalog, FreeSlot, Plan
from kvcsfs.engine.descriptors import Descriptors
from kvcsfs.engine.entry import BLOCK, TEMPORARY, UNPROVEN, Entry, charge, flags_of
from kvcsfs.engine.faults import point
from kvcsfs.engine.lane import Lane
from kvcsfs.engine.scrub import Scrub
from kvcsfs.engine.session import Session, Staged
from kvcsfs.engine.store import SlotStore, now
from kvcsfs.errors import BackingError, BusyError, CapacityError, ExistsError, KvcsError, NotFoundError

log = logging.getLogger(__name__)

EVICT_BATCH = 64  # victims of one background trip; a put waits for no more than that
RETRY_SECONDS = 5.0
LOOK_SECONDS = 2.0
HELD_SLOTS = 512  # free slots that keep a descriptor, as far as there are enough

Watcher = Callable[[int, Collection[str]], None]


class Volume:
    """One mountpoint. Its methods are the engine's; faces never call them.

    `watch` is called with (index, keys) for keys whose value came, went or changed.
    """

    def __init__(
        self, index: int, config: MountpointConfig, descriptor_limit: int, watch: Watcher, access: Access
    ) -> None:
        self.index = index
        self.access = access
        self.config = config
        self.store = SlotStore(config.path, config.io == "direct", config.durability == "fsync")
        self.lane = Lane(self.store)
        self.catalog = Catalog(config.capacity, access.domain)
        self.descriptors = Descriptors(descriptor_limit)
        self.recovering = True
        self.detached = False  # its directory is unmounted or replaced: gets miss, puts fail
        self.unwritable = False  # every write would fail: puts do at once, and evict nothing for it
        self.trouble = ""  # what is wrong with it, for people
        self.recovery = recovery.Watch()
        self.settling: dict[str, trio.Event] = {}  # keys whose writers on the mount have all flushed
        self.extras: dict[str, Any] = {}  # what faces keep in the snapshot
        self.counters = dict.fromkeys(
            (
                "hits",
                "misses",
                "puts",
                "deletes",
                "evictions",
                "evicted_bytes",
                "checksum_errors",
                "io_errors",
            ),
            0,
        )
        self.scrub = Scrub(config.scrub_rate, self.verify_entries)
        self._watch = watch
        self._claimed: dict[str, trio.Event] = {}
        self._reclaiming: set[Entry] = set()
        self._hold_limit = min(HELD_SLOTS, descriptor_limit // 4)
        self._keeping = 0  # bytes on the way to be free slots
        self._regrouped = False  # free slots are from other access domains
        self._low = trio.Event()
        self._loose = trio.Event()

    # -- plumbing

    @asynccontextmanager
    async def _claim(self, names: Collection[str]) -> AsyncIterator[None]:
        """Be the only step that changes these keys. Takes all or waits, so that two steps can't wait for each other."""
        with trio.CancelScope(shield=True):
            while blocked := [self._claimed[n] for n in names if n in self._claimed]:
                await blocked[0].wait()
            mine = trio.Event()
            self._claimed.update(dict.fromkeys(names, mine))
            try:
                yield
            finally:
                for name in names:
                    self._claimed.pop(name, None)
                mine.set()

    def _check_ready(self) -> None:
        if self.recovering:
            raise BusyError("the store is still recovering")
        if self.unwritable:
            raise BackingError(self.trouble)

    async def settled(self, names: Iterable[str], seconds: float = 0.2) -> None:
        """Wait for keys whose last writer on the mount is just closing: its release arrives after close() returned."""
        with trio.move_on_after(seconds):
            for event in [self.settling[n] for n in names if n in self.settling]:
                await event.wait()

    # -- reading

    def lookup(self, names: Sequence[str], temporaries: bool) -> list[Entry | None]:
        """The entries of keys."""
        get = self.catalog.index.get
        if self.detached:
            return [None] * len(names)
        if temporaries:
            return [get(name) for name in names]
        return [None if (e := get(name)) is None or e.flags & TEMPORARY else e for name in names]

    async def open(
        self, session: Session, names: Sequence[str], temporaries: bool, verify: bool
    ) -> tuple[list[Entry | None], dict[int, KvcsError]]:
        """Pin what is found, and see that each has a descriptor in the session's table; None is a miss.

        The second result has the positions whose object file can't be opened; nothing is pinned for those. With
        `verify` what is unproven is read first, for a caller that serves the bytes as they are.
        """
        if verify and (doubtful := [e for e in self.lookup(names, temporaries) if e and not e.proven]):
            await self.lane.step(self.verify_entries, list(dict.fromkeys(doubtful)))
        found = self.lookup(names, temporaries)
        hits = [e for e in found if e is not None]
        if hits:
            self.lane.check()
        missed = found.count(None)
        self.counters["misses"] += missed
        self.counters["hits"] += len(hits)
        self.catalog.pin(hits)
        table = self.descriptors.of(session.user)
        cold = list(dict.fromkeys(e for e in hits if e not in table))  # a key may come twice in a batch
        if not cold:
            return found, {}
        return await self.lane.step(self._open_cold, table, cold, found, undo=self._unopen)

    async def _unopen(self, opened: tuple[list[Entry | None], dict[int, KvcsError]]) -> None:
        self.release([e for e in opened[0] if e is not None])

    async def _open_cold(
        self, table: dict[Entry, int], cold: Sequence[Entry], found: list[Entry | None]
    ) -> tuple[list[Entry | None], dict[int, KvcsError]]:
        """Open descriptors. An entry whose file is gone leaves and is a miss; other failures are returned."""
        opened = dict(zip(cold, await self.lane.brief(jobs.open_many, cold), strict=True))
        errors: dict[int, KvcsError] = {}
        lost: list[Entry] = []
        spare: list[int] = []
        for i, entry in enumerate(found):
            outcome = opened.get(entry) if entry is not None else None
            if entry is None or outcome is None:
                continue
            if isinstance(outcome, int):
                opened.pop(entry)
                if table.setdefault(entry, outcome) != outcome:  # another request was faster
                    spare.append(outcome)
                continue
            found[i] = None
            lost.append(entry)
            if not isinstance(outcome, FileNotFoundError):
                self.counters["io_errors"] += 1
                errors[i] = BackingError(f"opening an object file: {outcome.strerror}")
            elif entry.live:
                self.catalog.remove(entry)
                self._watch(self.index, [entry.key])
        self.release(lost)
        await self.close_fds([*spare, *self.descriptors.surplus()])
        return found, errors

    async def descriptor(self, session: Session, entry: Entry) -> int:
        """The session's descriptor of a pinned entry. Raises BackingError, and the pin is gone."""
        table = self.descriptors.of(session.user)
        if entry not in table:
            found, errors = await self._open_cold(table, [entry], [entry])
            if found[0] is None:
                raise errors.get(0) or BackingError("opening an object file: it is gone")
        return table[entry]

    def release(self, entries: Sequence[Entry]) -> None:
        """Give pins back; what left the index meanwhile is reclaimed in the background."""
        if self.catalog.unpin(entries):
            self._loose.set()

    # -- writing

    async def reserve(
        self, session: Session, names: Sequence[str], sizes: Sequence[int]
    ) -> list[Staged | KvcsError]:
        """Promise bytes and a staged file for each key, in order, evicting as needed."""
        self._check_ready()
        every = [charge(size) for size in sizes]
        charges = every[: session.admit(every, self.catalog.ledger.capacity)]
        plan = self.catalog.promise(charges, names)
        point("reserve.promised")
        if missing := await self._make_room(plan):  # one file that can't be removed must not fail a put
            await self._make_room(self.catalog.shed(missing))
        staged = await self._stage(plan, charges, -self.catalog.ledger.free)
        again = [
            i
            for i, outcome in enumerate(staged)
            if isinstance(outcome, CapacityError) or (isinstance(outcome, KvcsError) and i in plan.recycle)
        ]
        if again:
            self._keep_stuck([plan.recycle[i] for i in again if i in plan.recycle])
            staged = await self._stage_again(staged, charges, again)
        results: list[Staged | KvcsError] = []
        for i, (charged, outcome) in enumerate(zip(charges, staged, strict=True)):
            if isinstance(outcome, tuple):
                slot, fd = outcome
                results.append(Staged(self, Entry(names[i], slot, sizes[i], b"", 0, 0.0), charged, fd))
                continue
            session.reserved -= charged
            if outcome is not None:
                self.catalog.unreserve(charged)
                self.counters["io_errors"] += 1
            results.append(outcome or self._no_room(charged))
        results += [CapacityError("the connection's share is reserved") for _ in names[len(charges) :]]
        return results

    async def _stage(
        self, plan: Plan, charges: Sequence[int], missing: int
    ) -> Sequence[jobs.Prepared | KvcsError | None]:
        """A file for each position of a plan, or what failed; None for what was refused.

        New files for the `missing` bytes are not made: what they were promised is still on disk.
        """
        outcomes: dict[int, jobs.Prepared | KvcsError] = {}
        for i in plan.create:
            if missing > 0:
                outcomes[i] = _unremovable()
                missing -= charges[i]
        granted = [i for i in range(len(charges)) if i not in plan.refused and i not in outcomes]
        steps = [plan.recycle.get(i) or plan.reuse.get(i) for i in granted]
        wanted = [charges[i] for i in granted]
        if plan.create:  # a new file is no brief matter
            staged = await self.lane.run(jobs.stage_many, self.store, steps, wanted)
        else:
            staged = await self.lane.brief(jobs.stage_many, steps, wanted)
        if len(granted) == len(charges):
            return staged
        outcomes.update(zip(granted, staged, strict=True))
        return [outcomes.get(i) for i in range(len(charges))]

    async def _stage_again(
        self,
        staged: Sequence[jobs.Prepared | KvcsError | None],
        charges: Sequence[int],
        failed: Sequence[int],
    ) -> Sequence[jobs.Prepared | KvcsError | None]:
        """Evict once more for the positions that failed, since the file system is full or a victim can't be had."""
        await self._make_room(self.catalog.shed(sum(charges[i] for i in failed)))
        if self.catalog.ledger.free < 0:
            return staged
        wanted = [charges[i] for i in failed]
        made = await self.lane.run(jobs.stage_many, self.store, [None] * len(failed), wanted)
        again = dict(zip(failed, made, strict=True))
        return [again.get(i, outcome) for i, outcome in enumerate(staged)]

    async def _make_room(self, plan: Plan) -> int:
        """Do what a plan needs before its files can be had; returns how many of its bytes could not be freed."""
        stuck: list[Entry] = []
        victims = plan.victims
        self._evicted(victims)
        await self.close_fds(self.descriptors.take(victims))
        if plan.unlink or plan.drop:
            stuck = await self.lane.run(jobs.make_room, self.store, plan)
            self._keep_stuck(stuck)
        self._wake_evictor()
        return sum(victim.charged for victim in stuck)

    async def close_fds(self, fds: Sequence[int]) -> None:
        """Close descriptors of object files."""
        if fds:
            await self.lane.brief(jobs.close_many, fds)

    def _no_room(self, size: int) -> CapacityError:
        can = max(self.catalog.obtainable, 0)
        return CapacityError(f"need {size} B, {can} B can be had, readers hold {self.catalog.pinned} B")

    def _keep_stuck(self, victims: Collection[Entry]) -> None:
        """Victims whose files can't be removed stay counted, and are tried again later."""
        self.counters["io_errors"] += len(victims)
        self.catalog.keep_stuck(victims)

    async def commit(self, staged: Sequence[Staged], if_exists: str = "overwrite") -> list[KvcsError | None]:
        """Publish staged objects whose checksums are set. What fails is aborted; the keys stand as they were."""
        results: list[KvcsError | None] = [None] * len(staged)
        last = {s.entry.key: i for i, s in enumerate(staged)}
        async with self._claim(last):
            try:
                await self._commit_claimed(staged, if_exists, results, last)
            except BaseException:  # a bug of ours; their bytes must not stay reserved for ever
                pending = [s for s in staged if not s.entry.live and s.entry not in self.catalog.retired]
                self.catalog.retire_staged(s.entry for s in pending)
                raise
        self._wake_evictor()
        return results

    async def _commit_claimed(
        self,
        staged: Sequence[Staged],
        if_exists: str,
        results: list[KvcsError | None],
        last: dict[str, int],
    ) -> None:
        created = now()
        dropped: list[Entry] = []
        positions: list[int] = []
        olds: list[Entry | None] = []
        for i, s in enumerate(staged):
            old = self.catalog.index.get(s.entry.key)
            if last[s.entry.key] != i:  # the same key later in the batch wins
                dropped.append(s.entry)
            elif old is not None and if_exists != "overwrite":
                results[i] = ExistsError(f"{s.entry.key!r} has a value")
                dropped.append(s.entry)
            else:
                s.entry.generation = self.store.number()
                s.entry.created = created
                positions.append(i)
                olds.append(old)
        entries = [staged[i].entry for i in positions]
        held = [old for old in olds if old is not None]
        self.catalog.pin(held)
        sealed = await self.lane.brief(jobs.seal_many, entries, olds)
        committed: list[Entry] = []
        for i, entry, outcome in zip(positions, entries, sealed, strict=True):
            if outcome is not None:
                results[i] = outcome
                self.counters["io_errors"] += isinstance(outcome, BackingError)
                dropped.append(entry)
                continue
            self.catalog.insert(entry)
            committed.append(entry)
        point("commit.indexed")
        self.catalog.refresh(committed, created)
        self.counters["puts"] += len(committed)
        self._watch(self.index, [e.key for e in committed])
        self.catalog.retire_staged(dropped)
        await self.reclaim([*dropped, *self.catalog.unpin(held)])

    async def give_up(self, session: Session, staged: Sequence[Staged]) -> None:
        """Undo reservations that nobody waited for, or whose session has ended."""
        await self.close_fds([s.fd for s in staged])
        session.reserved -= sum(s.charged for s in staged)
        await self.abort(staged)

    async def abort(self, staged: Iterable[Staged]) -> None:
        """Give reservations and their files back."""
        entries = [s.entry for s in staged]
        self.catalog.retire_staged(entries)
        await self.reclaim(entries)

    async def delete(self, names: Sequence[str], temporaries: bool) -> list[KvcsError | None]:
        """Remove keys. Their footers are void when this returns, so that nothing comes back after a crash.

        BackingError in the place of a key whose object could not be removed: it is gone until the next start.
        """
        self._check_ready()
        results: list[KvcsError | None] = [None] * len(names)
        async with self._claim(set(names)):
            entries: dict[Entry, int] = {}
            for i, name in enumerate(names):
                entry = self.catalog.index.get(name)
                if entry is None or (entry.flags & TEMPORARY and not temporaries):
                    results[i] = NotFoundError(f"{name!r} has no value")
                else:
                    self.catalog.remove(entry)
                    entries[entry] = i
            self.counters["deletes"] += len(entries)
            for entry, exc in (await self._discard(entries, self.store.durable)).items():
                results[entries[entry]] = BackingError(f"removing an object: {exc.strerror}")
        self._watch(self.index, [e.key for e in entries])
        return results

    async def _discard(self, entries: Collection[Entry], in_place: bool = False) -> dict[Entry, OSError]:
        """Void and reclaim entries that just left the index; returns those that would come back after a crash.

        What is still held is voided now and reclaimed later, as is everything with `in_place`.
        """
        held = [e for e in entries if e.pins or in_place]
        failed: dict[Entry, OSError] = {}
        if held:
            self.catalog.pin(held)
            outcomes = await self.lane.brief(jobs.void_many, held)
            failed = {e: exc for e, exc in zip(held, outcomes, strict=True) if exc}
            self.counters["io_errors"] += len(failed)
            self.catalog.unpin(held)
        stuck = await self.reclaim([e for e in entries if not e.pins])
        return {e: exc for e, exc in {**failed, **stuck}.items() if e in self.catalog.retired}

    async def rename(self, old: str, new: str) -> None:
        """Give the value of `old` the key `new`, replacing what that held. Raises NotFoundError."""
        self._check_ready()
        async with self._claim({old, new}):
            entry = self.catalog.index.get(old)
            if entry is None:
                raise NotFoundError(f"{old!r} has no value")
            if old == new:
                return
            target = self.catalog.index.get(new)
            held = [entry] if target is None else [entry, target]
            self.catalog.pin(held)
            staged = Entry(new, entry.slot, entry.size, entry.checksum, self.store.number(), entry.created)
            failed = await self.lane.run(jobs.rename, self.store, staged, target)
            if failed is None and not entry.live:  # found to be gone or wrong meanwhile
                failed = NotFoundError(f"{old!r} has no value")
            if failed is None:
                if target is not None and target.live:
                    self.catalog.remove(target)
                self.catalog.rename(entry, new, staged.generation)
            loose = self.catalog.unpin(held)
            self._watch(self.index, [old, new])
            await self.reclaim(loose)
            if failed is not None:
                raise failed

    # -- files of unknown size, written by the daemon itself

    async def stage_file(self, key: str, likely: int = 0) -> Staged:
        """A staged file that grows; `fd` reads and writes it. One of a `likely` size may take a slot of that size."""
        self._check_ready()
        if likely and (staged := await self._stage_likely(key, likely)):
            return staged
        await self._reserve_bytes(charge(0))
        try:
            slot, fd = await self.lane.run(jobs.create_file, self.store)
        except KvcsError:
            self.catalog.unreserve(charge(0))
            raise
        return Staged(self, Entry(key, slot, 0, b"", 0, 0.0, flags_of(key)), charge(0), fd)

    async def _stage_likely(self, key: str, size: int) -> Staged | None:
        """A slot to be written again for a file that will probably have this size; what is in it is void."""
        plan = self.catalog.promise([charge(size)], [key])
        if plan.refused:
            return None
        (outcome,) = await self._stage(plan, [charge(size)], await self._make_room(plan))
        if isinstance(outcome, tuple):
            (outcome,) = await self.lane.brief(jobs.own_many, [outcome])
        if isinstance(outcome, tuple):
            slot, fd = outcome
            return Staged(self, Entry(key, slot, size, b"", 0, 0.0, flags_of(key)), charge(size), fd)
        self.catalog.unreserve(charge(size))
        self._keep_stuck([*plan.recycle.values()])
        return None

    async def grow(self, staged: Staged, size: int) -> None:
        """Reserve for at least `size` bytes, doubling to keep the steps few. Raises CapacityError; nothing changes."""
        have = staged.charged
        if charge(size) <= have:
            return
        for wanted in (max(size, 2 * staged.entry.size, 16 * BLOCK), size):
            extra = charge(wanted) - have
            try:
                await self._reserve_bytes(extra)
            except CapacityError:
                if wanted == size:
                    raise
                continue
            if failed := await self._grow_file(staged.fd, have + extra, extra):
                self.catalog.unreserve(extra)
                if wanted == size:
                    raise failed
                continue
            staged.entry.resize(wanted)
            staged.charged += extra
            return

    async def _grow_file(self, fd: int, size: int, extra: int) -> KvcsError | None:
        """Take a file's blocks; if the file system has no room evict as much, and try once more."""
        failed = await self.lane.run(jobs.grow_file, fd, size)
        if isinstance(failed, CapacityError):
            await self._make_room(self.catalog.shed(extra))
            failed = await self.lane.run(jobs.grow_file, fd, size)
        return failed

    async def _reserve_bytes(self, size: int) -> None:
        """Reserve bytes without a file."""
        plan = self.catalog.promise([size], files=False)
        missing = await self._make_room(plan)
        if plan.refused:
            raise self._no_room(size)
        if missing:
            await self._make_room(self.catalog.shed(missing))
        if self.catalog.ledger.free < 0:
            self.catalog.unreserve(size)
            raise _unremovable()

    async def finish_file(self, staged: Staged, size: int, checksum: bytes | None) -> None:
        """Cut a grown file to its size, give the rest of its reservation back, and set its checksum; closes `fd`."""
        if checksum is None:
            checksum = await self.lane.run(jobs.finish_file, staged.fd, size, None)
        else:
            (checksum,) = await self.lane.brief(jobs.finish_many, [staged.fd], [size], [checksum])
        staged.entry.checksum = checksum
        self.catalog.unreserve(staged.charged - charge(size))
        staged.entry.resize(size)
        staged.charged = charge(size)

    async def drop_file(self, staged: Staged) -> None:
        """Close and abort a grown file."""
        await self.lane.run(jobs.close_all, [staged.fd])
        await self.abort([staged])

    # -- eviction and reclaim

    def _evicted(self, victims: Collection[Entry]) -> None:
        if victims:
            self.counters["evictions"] += len(victims)
            self.counters["evicted_bytes"] += sum(v.charged for v in victims)
            self._watch(self.index, [v.key for v in victims])

    async def reclaim(self, entries: Sequence[Entry]) -> dict[Entry, OSError]:
        """Make free slots of retired entries that nobody holds, as many as may be kept; unlink the others.

        Returns those that could not be removed; they stay retired and are tried again.
        """
        entries = [e for e in entries if e not in self._reclaiming and e in self.catalog.retired]
        if not entries:
            return {}
        self._reclaiming.update(entries)
        limit = self.catalog.ledger.capacity // FREE_SLOTS_SHARE
        kept: list[Entry] = []
        others: list[Entry] = []
        before = total = self.catalog.ledger.free_slots + self._keeping
        for entry in entries:
            fits = total + entry.charged <= limit
            total += entry.charged * fits
            (kept if fits else others).append(entry)
        self._keeping += total - before
        stuck: dict[Entry, OSError] = {}
        try:
            await self.close_fds(self.descriptors.take(entries))
            if kept:
                holds = self._holds(len(kept))
                stuck |= self._book(kept, await self.lane.brief(jobs.recycle_many, kept, holds))
            if others:
                stuck |= self._book(others, await self.lane.run(jobs.unlink_many, self.store, others))
        finally:
            self._reclaiming.difference_update(entries)
            self._keeping -= total - before
        return stuck

    def _holds(self, count: int) -> list[bool]:
        """Which of so many new free slots keep their descriptor."""
        left = self._hold_limit - sum(s.fd >= 0 for s in self.catalog.free_slots()) - len(self._reclaiming)
        return [i < left for i in range(count)]

    def _book(
        self, entries: Sequence[Entry], outcomes: Sequence[FreeSlot | OSError | None]
    ) -> dict[Entry, OSError]:
        stuck: dict[Entry, OSError] = {}
        for entry, outcome in zip(entries, outcomes, strict=True):
            if isinstance(outcome, OSError):
                stuck[entry] = outcome
            else:
                self.catalog.reclaimed(entry, outcome)
        self.counters["io_errors"] += len(stuck)
        return stuck

    async def evict(self, prefix: str, target: int) -> tuple[int, int]:
        """Evict entries below `prefix`, least recently used first, until `target` bytes went; 0 for all."""
        self._check_ready()
        count = freed = 0
        victims = [e for e in self.catalog.victims() if e.key.startswith(prefix)]
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
            self.catalog.remove(entry)
        self._evicted(batch)
        await self._discard(batch)

    def _wake_evictor(self) -> None:
        ledger = self.catalog.ledger
        if self.catalog.room < ledger.capacity * self.config.low_watermark:
            self._low.set()

    def resize(self, config: MountpointConfig) -> None:
        """Take another capacity and other watermarks. What doesn't fit any more is evicted in the background."""
        self.config = config
        self.catalog.ledger.capacity = config.capacity
        self._low.set()

    def access_changed(self) -> None:
        """The access domains are others now."""
        self._regrouped = True
        self._low.set()

    async def keep_room(self) -> None:
        """Background: when less than the low watermark is free, evict up to the high one."""
        while True:
            await self._low.wait()
            self._low = trio.Event()
            if self._regrouped:
                self._regrouped = False
                await self.drop_free()
            if not self.recovering:
                await self._clear(self.catalog.ledger.capacity * self.config.high_watermark)

    async def _clear(self, goal: float) -> None:
        """Evict until `goal` bytes can be had without an eviction; then bring the files within the capacity."""
        while batch := self._oldest(goal - self.catalog.room):
            before = self.catalog.room
            await self._evict(batch)
            if self.catalog.room <= before:  # files can't be removed: going on would empty the store
                break
        while self.catalog.ledger.free < 0 and (free := self.catalog.drop_free()):
            await self.lane.run(jobs.drop, self.store, free)

    async def drop_free(self) -> None:
        """Give up every free slot: of which access domain it is isn't known, as after a start, or has changed."""
        while free := self.catalog.drop_free():
            await self.lane.run(jobs.drop, self.store, free)

    def _oldest(self, missing: float) -> list[Entry]:
        """The next victims for `missing` bytes, a batch at most."""
        batch: list[Entry] = []
        for entry in self.catalog.victims():
            if missing <= 0 or len(batch) == EVICT_BATCH:
                break
            batch.append(entry)
            missing -= entry.charged
        return batch

    async def reclaim_loose(self) -> None:
        """Background: reclaim what readers let go, and try again what could not be removed."""
        while True:
            with trio.move_on_after(RETRY_SECONDS):
                await self._loose.wait()
            self._loose = trio.Event()
            await self.reclaim([e for e in self.catalog.retired if not e.pins])

    async def look_after(self) -> None:
        """Background: tell when the backing directory goes or takes no writes, and when it is back."""
        failures = 0
        while True:
            await trio.sleep(LOOK_SECONDS)
            writes = bool(self.trouble) or self.counters["io_errors"] != failures
            failures = self.counters["io_errors"]
            there, failed = await self.lane.run(jobs.examine, self.store, writes)
            self.detached = not there
            self.unwritable = not there or (failed is not None and failed.errno != errno.ENOSPC)
            trouble = "" if there else "the backing directory was unmounted or replaced"
            self._tell_trouble(trouble or (str(failed.strerror) if failed else ""))

    def _tell_trouble(self, trouble: str) -> None:
        if trouble and trouble != self.trouble:
            log.warning("%s: in trouble: %s", self.config.path, trouble)
        elif self.trouble and not trouble:
            log.info("%s: out of trouble", self.config.path)
        self.trouble = trouble

    # -- verification

    async def verify(self, names: Sequence[str]) -> list[int]:
        """Read values and drop the wrong ones. Returns sizes; 0 for what is absent or was dropped."""
        entries = [self.catalog.index.get(name) for name in names]
        await self.verify_entries([e for e in entries if e is not None])
        return [e.size if e is not None and e.live else 0 for e in entries]

    async def verify_entries(self, entries: Sequence[Entry], unreadable_too: bool = False) -> list[Entry]:
        """Read the values of entries in the index, drop the wrong ones and return them.

        What can't be read is dropped with `unreadable_too` alone: it may be right, and the trouble may end.
        """
        self.catalog.pin(entries)
        outcomes = dict(zip(entries, await self.lane.run(jobs.verify_many, self.store, entries), strict=True))
        wrong = [e for e in outcomes if outcomes[e] is False and e.live]
        unreadable = [e for e in outcomes if isinstance(outcomes[e], OSError) and e.live]
        for entry in entries:
            if outcomes[entry] is True:
                entry.flags &= ~UNPROVEN
        self.counters["checksum_errors"] += len(wrong)
        self.counters["io_errors"] += len(unreadable)
        if wrong:
            log.warning("%s: dropped %d entries with a wrong checksum", self.config.path, len(wrong))
        if unreadable:
            log.warning("%s: %d entries can't be read", self.config.path, len(unreadable))
        dropped = wrong + unreadable * unreadable_too
        for entry in dropped:
            self.catalog.remove(entry)
        if dropped:
            self._watch(self.index, [e.key for e in dropped])
            await self._discard(dropped)
        self.release(entries)
        return dropped

    # -- start and stop

    async def recover(self) -> None:
        """Fill the catalog from the snapshot or the footers; entries over the capacity leave, oldest first."""
        self.recovery = recovery.Watch()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._stop_recovery)
            outcome = await self.lane.run(self._recovered)
            nursery.cancel_scope.cancel()
        if outcome is None:
            await trio.lowlevel.checkpoint()  # raises Cancelled, the only reason for it
            raise AssertionError("recovery stopped and nobody stops")
        if isinstance(outcome, OSError):
            raise outcome
        found, catalog = outcome
        catalog.ledger.capacity = self.catalog.ledger.capacity
        catalog.domain = self.access.domain
        self.catalog = catalog
        self.extras.update(found.extras)
        self.scrub.begin([e for e in found.entries if not e.proven])
        await self._clear(0)
        if self.access.restricted:
            await self.drop_free()
        self.recovering = False

    def _recovered(self) -> tuple[recovery.Found, Catalog] | OSError | None:
        """In a thread: the catalog is built aside, as the event loop reads the present one. None: the daemon stops."""
        try:
            found = recovery.recover(self.store, self.recovery)
        except recovery.Stopped:
            return None
        except OSError as exc:
            return exc
        return found, recovery.load(found, self.catalog.ledger.capacity)

    async def _stop_recovery(self) -> None:
        """Tell the thread when the daemon stops: a cancellation doesn't reach it."""
        try:
            await trio.sleep_forever()
        finally:
            self.recovery.stopped = True

    async def checkpoint(self, clean: bool = False) -> None:
        """Write the snapshot; `clean` says that it is exact and nothing follows it."""
        if self.recovering or self.detached:
            return
        writer = await self.lane.run(recovery.SnapshotWriter, self.store)
        try:
            after = ""
            while rows := self.catalog.index.page("", after, recovery.SLICE):
                after = rows[-1].key
                await self.lane.run(writer.add, recovery.rows(rows))
            free = list(self.catalog.free_slots()) if clean else []
            await self.lane.run(writer.finish, free, self.extras, clean)
        except OSError:
            await self.lane.run(writer.abandon)
            raise

    async def close(self) -> None:
        """Write the last snapshot and give the directory up. Without one the next start reads the footers."""
        try:
            await self.lane.step(self._close)
        except BackingError:  # its descriptors go with the process: closing them would wait, too
            log.warning("%s: no snapshot: the backing file system doesn't answer", self.config.path)

    async def _close(self) -> None:
        await self.reclaim([e for e in self.catalog.retired if not e.pins])
        held = [s.fd for s in self.catalog.free_slots() if s.fd >= 0]
        await self.close_fds([*self.descriptors.clear(), *held])  # first, so that the snapshot finds one
        try:
            await self.checkpoint(clean=not self.catalog.retired)
        except OSError as exc:
            log.warning("%s: no snapshot: %s", self.config.path, exc.strerror)
        await self.lane.run(self.store.close)

    def _state(self) -> str:
        if self.lane.hung:
            return "hung"
        if self.recovering:
            return "recovering"
        return "failing" if self.trouble else "ready"

    def status(self) -> dict[str, Any]:
        """Figures of this mountpoint."""
        ledger = self.catalog.ledger
        entries, value_bytes, _ = self.catalog.index.usage("")
        return {
            "index": self.index,
            "path": str(self.config.path),
            "state": self._state(),
            "trouble": self.trouble,
            "capacity_bytes": ledger.capacity,
            "used_bytes": ledger.used,
            "committed_bytes": ledger.committed,
            "reserved_bytes": ledger.reserved,
            "retired_bytes": ledger.retired,
            "free_slot_bytes": ledger.free_slots,
            "value_bytes": value_bytes,
            "entries": entries,
            "pinned_bytes": self.catalog.pinned,
            "descriptors": len(self.descriptors),
            "hangs": self.lane.hangs,
            "recovered_entries": self.recovery.entries,
            "recovered_share": round(self.recovery.share, 3),
            "scrub_total_bytes": self.scrub.total_bytes,
            "scrub_done_bytes": self.scrub.done_bytes,
            **self.counters,
        }

    def check(self) -> None:
        """Assert the invariants."""
        self.catalog.check()


def _unremovable() -> BackingError:
    return BackingError("an evicted object can't be removed")
