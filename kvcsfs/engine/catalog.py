"""The pure core of one mountpoint: one call moves index, order of use, ledger and pins together.

No I/O, no clock, no trio; nothing here awaits, so nothing needs a lock. What must happen to files is returned as
plain data (`Plan`, lists of entries) for the layer that does it, and that layer reports back what came of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

from kvcsfs.engine.entry import Entry
from kvcsfs.engine.index import Index
from kvcsfs.engine.ledger import Ledger
from kvcsfs.engine.lru import Lru

FREE_SLOTS_SHARE = 20  # free slots hold at most a twentieth of the capacity


@dataclasses.dataclass(slots=True)
class FreeSlot:
    """A file of `size` bytes that belongs to nobody; `fd` is a writable descriptor kept for it, or -1.

    Bytes of its last value are still in it, so that it serves no other access domain than that value's.
    """

    slot: int
    size: int
    fd: int = -1
    domain: str | None = None


@dataclasses.dataclass(slots=True)
class Plan:
    """What to do so that bytes promised to a put are really there. Positions are those of the batch.

    Every promised position is in exactly one of `reuse` (a free slot), `recycle` (a victim of the same size) and
    `create`. `unlink` and `drop` make room for them, so they go first.
    """

    reuse: dict[int, FreeSlot] = dataclasses.field(default_factory=dict)
    recycle: dict[int, Entry] = dataclasses.field(default_factory=dict)
    create: list[int] = dataclasses.field(default_factory=list)
    unlink: list[Entry] = dataclasses.field(default_factory=list)
    drop: list[FreeSlot] = dataclasses.field(default_factory=list)
    refused: list[int] = dataclasses.field(default_factory=list)

    @property
    def victims(self) -> list[Entry]:
        """The entries that leave the index for it."""
        return [*self.recycle.values(), *self.unlink]


class Catalog:
    """Entries of one mountpoint, their order of use, their bytes and their pins.

    Invariant: committed bytes are the sum over the index; the LRU list has exactly the entries of the index; retired
    bytes are the sum over `retired`; `pinned` is the sum over entries in the index that a lease holds; free slot
    bytes are the sum over the free slots.
    """

    def __init__(self, capacity: int, domain: Callable[[str], str | None] = lambda _key: None) -> None:
        self.domain = domain  # the access domain of a key
        self.index = Index()
        self.lru = Lru()
        self.ledger = Ledger(capacity)
        self.retired: set[Entry] = set()
        self.pinned = 0
        self._free: dict[tuple[int, str | None], list[FreeSlot]] = {}

    # -- lookup and pins

    def touch(self, entries: Sequence[Entry], now: float) -> None:
        """Count a use of each entry. The last becomes older than the first: of a prefix chain the tail goes first."""
        for entry in entries:
            entry.hits += 1
            entry.used = now
        self.lru.touch(reversed(entries))

    def pin(self, entries: Iterable[Entry]) -> None:
        """Hold entries: their slots are not reused until `unpin`."""
        for entry in entries:
            if not entry.pins and entry.newer is not None:
                self.pinned += entry.charged
            entry.pins += 1

    def unpin(self, entries: Iterable[Entry]) -> list[Entry]:
        """Undo one `pin` of each, and return those that left the index meanwhile and that nobody holds now."""
        loose = []
        for entry in entries:
            entry.pins -= 1
            if not entry.pins:
                if entry.newer is not None:
                    self.pinned -= entry.charged
                else:
                    loose.append(entry)
        return loose

    @property
    def held(self) -> bool:
        """Whether somebody holds an entry, in the index or retired, or has bytes reserved."""
        return bool(self.pinned or self.ledger.reserved) or any(e.pins for e in self.retired)

    # -- room

    @property
    def room(self) -> int:
        """Bytes that a put can have without an eviction, free slots included."""
        return self.ledger.free + self.ledger.free_slots

    @property
    def obtainable(self) -> int:
        """Bytes that a put can have if everything evictable is evicted."""
        return self.room + self.ledger.committed - self.pinned

    def promise(self, charges: Sequence[int], names: Sequence[str] = (), files: bool = True) -> Plan:
        """Reserve bytes for each charge, in order, as far as they can be had; the rest is `refused`.

        A slot is written again for a name of its own access domain alone. Without `files` it makes room alone:
        nothing is reused, recycled or created.
        """
        plan = Plan()
        ledger = self.ledger
        victims = self.victims()
        free, obtainable = ledger.free, self.obtainable
        for i, charged in enumerate(charges):
            if charged > obtainable:
                plan.refused.append(i)
                continue
            obtainable -= charged
            domain = self.domain(names[i]) if names else None
            if files and (slot := self._pop_free(charged, domain)):
                plan.reuse[i] = slot
                ledger.free_slots -= charged
            else:
                while free < charged and (other := self.drop_free()):
                    plan.drop.append(other)
                    free += other.size
                if free < charged:
                    free += self._evict_for(charged - free, charged, i, plan, victims, domain, files)
                if files and i not in plan.recycle:
                    plan.create.append(i)
                free -= charged
            ledger.reserved += charged
        return plan

    def shed(self, size: int) -> Plan:
        """Give up free slots and the least recently used entries, until files of `size` bytes in all are to go.

        For a file system that is full before the ledger is; nothing is reserved.
        """
        plan = Plan()
        while size > 0 and (slot := self.drop_free()):
            plan.drop.append(slot)
            size -= slot.size
        for victim in self.victims():
            if size <= 0:
                break
            self._leave(victim)
            charged = victim.charged
            self.ledger.committed -= charged
            plan.unlink.append(victim)
            size -= charged
        return plan

    def _evict_for(
        self,
        missing: int,
        charged: int,
        i: int,
        plan: Plan,
        victims: Iterator[Entry],
        domain: str | None,
        files: bool,
    ) -> int:
        """Evict until `missing` bytes are free, and return how many are.

        With `files` a victim whose slot has the size `charged` is recycled for position i, and is the last.
        """
        freed = 0
        while freed < missing:
            victim = next(victims)
            self._leave(victim)
            size = victim.charged
            self.ledger.committed -= size
            freed += size
            if files and size == charged and self.domain(victim.key) == domain:
                plan.recycle[i] = victim
                break
            plan.unlink.append(victim)
        return freed

    def victims(self) -> Iterator[Entry]:
        """Yield entries in the order of eviction; one that somebody reads is passed over."""
        for entry in self.lru:
            if not entry.pins:
                yield entry

    # -- free slots

    def _pop_free(self, size: int, domain: str | None) -> FreeSlot | None:
        stack = self._free.get((size, domain))
        if not stack:
            return None
        slot = stack.pop()
        if not stack:
            del self._free[size, domain]
        return slot

    def drop_free(self) -> FreeSlot | None:
        """Give up a free slot of any size: its bytes are free, the caller removes the file."""
        kind = next(iter(self._free), None)
        if kind is None:
            return None
        self.ledger.free_slots -= kind[0]
        return self._pop_free(*kind)

    def add_free(self, slot: FreeSlot) -> None:
        """Keep a slot; its bytes were not counted until now."""
        self.ledger.free_slots += slot.size
        self._free.setdefault((slot.size, slot.domain), []).append(slot)

    def free_slots(self) -> Iterator[FreeSlot]:
        """Yield every free slot."""
        for stack in self._free.values():
            yield from stack

    # -- changes

    def load(self, entries: list[Entry]) -> None:
        """Take entries found at start, and put the list in order of use; keys that are there already must not recur.

        Of entries used in one batch the later ones were refreshed first: they were put later, and are needed less.
        """
        # First, as entries are visited as they lie in memory then: in order of use it takes twice as long (measured).
        self.index.load(entries)
        # Two sorts, as each keeps what the other did: by pairs it takes twice as long, and all of it in one call.
        entries.sort(key=attrgetter("generation"), reverse=True)
        entries.sort(key=attrgetter("used"))
        for entry in entries:
            self.lru.add(entry)
            self.ledger.committed += entry.charged

    def dismantle(self) -> None:
        """Take every entry out, of a catalog that nothing uses any more: linked to each other they would stay."""
        for entry in self.index.drain():
            self.lru.remove(entry)

    def insert(self, entry: Entry) -> Entry | None:
        """Publish an entry whose bytes are reserved, and return the entry that it replaces, retired."""
        replaced: Entry | None = self.index.get(entry.key)
        if replaced is not None:
            self.remove(replaced)
        self.index.add(entry)
        self.lru.add(entry)
        charged = entry.charged
        self.ledger.reserved -= charged
        self.ledger.committed += charged
        if entry.pins:  # a writer's own readers hold it from the start
            self.pinned += charged
        return replaced

    def remove(self, entry: Entry) -> None:
        """Take an entry out of the index; its bytes are retired until `reclaimed`."""
        self._leave(entry)
        self.retired.add(entry)
        charged = entry.charged
        self.ledger.committed -= charged
        self.ledger.retired += charged

    def _leave(self, entry: Entry) -> None:
        if entry.pins:
            self.pinned -= entry.charged
        self.index.remove(entry)
        self.lru.remove(entry)

    def rename(self, entry: Entry, key: str, generation: int) -> None:
        """Move an entry to a key that is free; its place in the order of use and its pins stay."""
        self.index.remove(entry)
        entry.rename(key)
        entry.generation = generation
        self.index.add(entry)

    def reclaimed(self, entry: Entry, kept: FreeSlot | None) -> None:
        """The file of a retired entry is a free slot now, or is gone."""
        self.retired.remove(entry)
        self.ledger.retired -= entry.charged
        if kept:
            kept.domain = self.domain(entry.key)
            self.add_free(kept)

    def retire_staged(self, entries: Iterable[Entry]) -> None:
        """Objects that will not be committed: their bytes are retired until `reclaimed`."""
        for entry in entries:
            charged = entry.charged
            self.ledger.reserved -= charged
            self.ledger.retired += charged
            self.retired.add(entry)

    def unreserve(self, charged: int) -> None:
        """Give reserved bytes back that have no file."""
        self.ledger.reserved -= charged

    def keep_stuck(self, victims: Iterable[Entry]) -> None:
        """Victims of a plan whose files could not be removed: their bytes are still there."""
        for victim in victims:
            self.ledger.retired += victim.charged
            self.retired.add(victim)

    def check(self) -> None:
        """Assert the invariants of this and of every part."""
        self.index.check()
        self.lru.check()
        self.ledger.check()
        live = list(self.index.entries())
        assert set(live) == set(self.lru), "index and order of use differ"
        assert self.ledger.committed == sum(e.charged for e in live)
        assert self.ledger.retired == sum(e.charged for e in self.retired)
        assert not any(e.live for e in self.retired)
        assert self.pinned == sum(e.charged for e in live if e.pins)
        assert self.ledger.free_slots == sum(s.size for s in self.free_slots())
        assert all(e.pins >= 0 for e in live)
