"""Writes: the steps that put, publish, remove and rename the values of one mountpoint, a batch each."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvcsfs.engine import jobs
from kvcsfs.engine.catalog import Plan
from kvcsfs.engine.entry import TEMPORARY, Entry, charge
from kvcsfs.engine.faults import point
from kvcsfs.engine.room import unremovable
from kvcsfs.engine.session import Session, Staged
from kvcsfs.errors import BackingError, CapacityError, ExistsError, KvcsError, NotFoundError

if TYPE_CHECKING:
    from kvcsfs.engine.volume import Volume


class Writes:
    """The writes of a volume."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._room = volume.room
        self._lane, self._store, self._counters = volume.lane, volume.store, volume.counters

    # -- reserve

    async def reserve(
        self, session: Session, names: Sequence[str], sizes: Sequence[int]
    ) -> list[Staged | KvcsError]:
        """Promise bytes and a staged file for each key, in order, evicting as needed."""
        self._volume.check_ready()
        catalog = self._volume.catalog
        every = [charge(size) for size in sizes]
        charges = every[: session.admit(every, catalog.ledger.capacity)]
        plan = catalog.promise(charges, names)
        point("reserve.promised")
        with self._volume.leaving(plan.recycle.values()):
            if missing := await self._room.make(plan):  # one file that can't be removed must not fail a put
                await self._room.make(catalog.shed(missing))
            staged = await self.stage(plan, charges, -catalog.ledger.free)
        failed = [i for i, outcome in enumerate(staged) if isinstance(outcome, KvcsError)]
        again = [i for i in failed if i in plan.recycle or isinstance(staged[i], CapacityError)]
        if again:
            self._room.keep_stuck([plan.recycle[i] for i in again if i in plan.recycle])
            staged = await self._stage_again(staged, charges, again)
        results: list[Staged | KvcsError] = []
        for i, (charged, outcome) in enumerate(zip(charges, staged, strict=True)):
            if isinstance(outcome, tuple):
                slot, fd = outcome
                results.append(Staged(self._volume, Entry(names[i], slot, sizes[i], b"", 0, 0.0), fd))
                continue
            session.reserved -= charged
            if outcome is not None:
                catalog.unreserve(charged)
                self._counters["io_errors"] += 1
            results.append(outcome or self._room.refusal(charged))
        results += [CapacityError("the connection's share is reserved") for _ in names[len(charges) :]]
        return results

    async def stage(
        self, plan: Plan, charges: Sequence[int], missing: int
    ) -> Sequence[jobs.Prepared | KvcsError | None]:
        """A file for each position of a plan, or what failed; None for what was refused.

        New files for the `missing` bytes are not made: what they were promised is still on disk.
        """
        outcomes: dict[int, jobs.Prepared | KvcsError] = {}
        for i in plan.create:
            if missing > 0:
                outcomes[i] = unremovable()
                missing -= charges[i]
        granted = [i for i in range(len(charges)) if i not in plan.refused and i not in outcomes]
        steps = [plan.recycle.get(i) or plan.reuse.get(i) for i in granted]
        wanted = [charges[i] for i in granted]
        if plan.create:  # a new file is no brief matter
            staged = await self._lane.run(jobs.stage_many, self._store, steps, wanted)
        else:
            staged = await self._lane.brief(jobs.stage_many, steps, wanted)
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
        catalog = self._volume.catalog
        await self._room.make(catalog.shed(sum(charges[i] for i in failed)))
        if catalog.ledger.free < 0:
            return staged
        wanted = [charges[i] for i in failed]
        made = await self._lane.run(jobs.stage_many, self._store, [None] * len(failed), wanted)
        again = dict(zip(failed, made, strict=True))
        return [again.get(i, outcome) for i, outcome in enumerate(staged)]

    # -- what ends a reservation

    async def commit(self, staged: Sequence[Staged], if_exists: str = "overwrite") -> list[KvcsError | None]:
        """Publish staged objects whose checksums are set. What fails is aborted; the keys stand as they were."""
        results: list[KvcsError | None] = [None] * len(staged)
        last = {s.entry.key: i for i, s in enumerate(staged)}
        async with self._volume.claim(last):
            try:
                await self._commit_claimed(staged, if_exists, results, last)
            except BaseException:  # a bug of ours; their bytes must not stay reserved for ever
                catalog = self._volume.catalog
                pending = [s for s in staged if not s.entry.live and s.entry not in catalog.retired]
                catalog.retire_staged(s.entry for s in pending)
                raise
        if len(last) < len(staged):  # of one key the last speaks for all
            results = [results[last[s.entry.key]] for s in staged]
        self._room.wake()
        return results

    async def _commit_claimed(
        self,
        staged: Sequence[Staged],
        if_exists: str,
        results: list[KvcsError | None],
        last: dict[str, int],
    ) -> None:
        catalog = self._volume.catalog
        created, number = time.time(), self._store.directory.number
        dropped: list[Entry] = []
        positions: list[int] = []
        olds: list[Entry | None] = []
        for i, s in enumerate(staged):
            old = catalog.index.get(s.entry.key)
            if last[s.entry.key] != i:  # the same key later in the batch wins
                dropped.append(s.entry)
            elif old is not None and if_exists != "overwrite":
                results[i] = ExistsError(f"{s.entry.key!r} has a value")
                dropped.append(s.entry)
            else:
                s.entry.generation = number()
                s.entry.created = s.entry.used = created
                positions.append(i)
                olds.append(old)
        entries = [staged[i].entry for i in positions]
        held = [old for old in olds if old is not None]
        catalog.pin(held)
        sealed = await self._lane.brief(jobs.seal_many, entries, olds)
        committed: list[Entry] = []
        # The last first: of a prefix chain the tail is the older, and goes first.
        for i, entry, outcome in zip(positions[::-1], entries[::-1], sealed[::-1], strict=True):
            if outcome is not None:
                results[i] = outcome
                self._counters["io_errors"] += isinstance(outcome, BackingError)
                dropped.append(entry)
                continue
            catalog.insert(entry)
            committed.append(entry)
        point("commit.indexed")
        self._counters["puts"] += len(committed)
        self._volume.changed([e.key for e in committed])
        catalog.retire_staged(dropped)
        await self._room.reclaim([*dropped, *catalog.unpin(held)])

    async def give_up(self, session: Session, staged: Sequence[Staged]) -> None:
        """Undo reservations that nobody waited for, or whose session has ended."""
        await self._volume.close_fds([s.fd for s in staged])
        session.reserved -= sum(s.charged for s in staged)
        await self.abort(staged)

    async def abort(self, staged: Iterable[Staged]) -> None:
        """Give reservations and their files back."""
        entries = [s.entry for s in staged]
        self._volume.catalog.retire_staged(entries)
        await self._room.reclaim(entries)

    # -- keys that have a value

    async def delete(self, names: Sequence[str], temporaries: bool) -> list[KvcsError | None]:
        """Remove keys. Their footers are void when this returns, so that nothing comes back after a crash.

        BackingError in the place of a key whose object could not be removed: it is gone until the next start.
        """
        self._volume.check_ready()
        catalog = self._volume.catalog
        results: list[KvcsError | None] = [None] * len(names)
        async with self._volume.claim(set(names)):
            entries: dict[Entry, int] = {}
            for i, name in enumerate(names):
                entry = catalog.index.get(name)
                if entry is None or (entry.flags & TEMPORARY and not temporaries):
                    results[i] = NotFoundError(f"{name!r} has no value")
                else:
                    catalog.remove(entry)
                    entries[entry] = i
            self._counters["deletes"] += len(entries)
            for entry, exc in (await self._room.discard(entries, self._store.durable)).items():
                results[entries[entry]] = BackingError(f"removing an object: {exc.strerror}")
        self._volume.changed([e.key for e in entries])
        return results

    async def rename(self, old: str, new: str) -> None:
        """Give the value of `old` the key `new`, replacing what that held. Raises NotFoundError."""
        self._volume.check_ready()
        catalog = self._volume.catalog
        async with self._volume.claim({old, new}):
            entry = catalog.index.get(old)
            if entry is None:
                raise NotFoundError(f"{old!r} has no value")
            if old == new:
                return
            target = catalog.index.get(new)
            held = [entry] if target is None else [entry, target]
            catalog.pin(held)
            staged = Entry(
                new, entry.slot, entry.size, entry.checksum, self._store.directory.number(), entry.created
            )
            failed = await self._lane.run(jobs.rename, self._store, staged, target)
            if failed is None and not entry.live:  # found to be gone or wrong meanwhile
                failed = NotFoundError(f"{old!r} has no value")
            if failed is None:
                if target is not None and target.live:
                    catalog.remove(target)
                catalog.rename(entry, new, staged.generation)
            loose = catalog.unpin(held)
            self._volume.changed([old, new])
            await self._room.reclaim(loose)
            if failed is not None:
                raise failed
