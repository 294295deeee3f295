"""Volume: one mountpoint's catalog and files, and what its parts share: claims, lookups, pins and descriptors.

A step changes the catalog, goes to a worker thread once for its file work, and changes the catalog again. It is
shielded: what has begun completes, whoever waits for it. Between its two changes other steps run, so an entry is
pinned by every step that still needs its file, `claim` lets one commit, rename or delete at a time touch a key, and
`leaving` lets nobody be told that a key is gone while a crash would bring it back.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import trio

from kvcsfs.config import MountpointConfig
from kvcsfs.engine import jobs
from kvcsfs.engine.access import Access
from kvcsfs.engine.catalog import Catalog
from kvcsfs.engine.descriptors import Descriptors
from kvcsfs.engine.entry import SOLE, TEMPORARY, Entry
from kvcsfs.engine.files import Files
from kvcsfs.engine.lane import Lane
from kvcsfs.engine.room import Room
from kvcsfs.engine.scrub import Scrub
from kvcsfs.engine.session import Session
from kvcsfs.engine.store import SlotStore
from kvcsfs.engine.upkeep import Upkeep
from kvcsfs.engine.verifier import Verifier
from kvcsfs.engine.writes import Writes
from kvcsfs.errors import BackingError, BusyError, KvcsError

Watcher = Callable[[int, Collection[str] | None], None]


class Volume:
    """One mountpoint: what it holds, and the parts that work on it. Its methods are the engine's, not the faces'.

    `watch` is called with (index, keys) for keys whose value came, went or changed; keys None: all that there is.
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
        self.recovering = True  # nothing is known of what its directory holds
        self.detached = False  # its directory is unmounted or replaced: gets miss, puts fail
        self.unwritable = False  # every write would fail: puts do at once, and evict nothing for it
        self.trouble = ""  # what is wrong with it, for people
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
        self.changed = functools.partial(watch, index)
        self._claimed: dict[str, trio.Event] = {}
        self._leaving: dict[str, trio.Event] = {}  # keys that left the index and are still whole on disk
        self.room = Room(self, descriptor_limit)
        self.writes = Writes(self)
        self.files = Files(self)
        self.verifier = Verifier(self)
        self.scrub = Scrub(config.scrub_rate, self.verifier.verify_entries)
        self.upkeep = Upkeep(self)

    # -- for the parts

    @asynccontextmanager
    async def claim(self, names: Collection[str]) -> AsyncIterator[None]:
        """Be the only step that changes these keys. Takes all or waits, so that two steps can't wait for each other.

        What leaves meanwhile is waited for: else what is put and deleted here would be outlived by what was before.
        """
        with trio.CancelScope(shield=True):
            held = self._claimed, self._leaving
            while blocked := [keys[n] for keys in held if keys for n in names if n in keys]:
                await blocked[0].wait()
            mine = trio.Event()
            self._claimed.update(dict.fromkeys(names, mine))
            try:
                yield
            finally:
                for name in names:
                    self._claimed.pop(name, None)
                mine.set()

    @contextmanager
    def leaving(self, entries: Collection[Entry]) -> Iterator[None]:
        """Keep who misses the keys of entries that just left the index waiting, until their files are void or gone.

        Who holds this must wait for no claim.
        """
        gone = trio.Event()
        self._leaving.update((e.key, gone) for e in entries)
        try:
            yield
        finally:
            for entry in entries:
                if self._leaving.get(entry.key) is gone:
                    del self._leaving[entry.key]
            gone.set()

    @property
    def held(self) -> bool:
        """Whether somebody has something of it: work under way, pins, reservations."""
        return self.lane.busy or self.catalog.held

    def check_ready(self) -> None:
        """Raise BusyError or BackingError when nothing can be written."""
        if self.recovering and not self.detached:
            raise BusyError("the store is still recovering")
        if self.unwritable:
            raise BackingError(self.trouble)

    async def settled(self, names: Iterable[str], seconds: float = 0.2) -> None:
        """Wait for keys whose last writer on the mount is just closing: its release arrives after close() returned."""
        with trio.move_on_after(seconds):
            for event in [self.settling[n] for n in names if n in self.settling]:
                await event.wait()

    async def close_fds(self, fds: Sequence[int]) -> None:
        """Close descriptors of object files."""
        if fds:
            await self.lane.brief(jobs.close_many, fds)

    # -- reading

    @property
    def calm(self) -> bool:
        """Whether no key is settling or leaving: then a lookup is the answer."""
        return not self.settling and not self._leaving

    def lookup(self, names: Sequence[str], temporaries: bool) -> list[Entry | None]:
        """The entries of keys."""
        if self.detached:
            return [None] * len(names)
        found = list(map(self.catalog.index.get, names))
        if temporaries:
            return found
        return [None if e is None or e.flags & TEMPORARY else e for e in found]

    def _departures(self, names: Sequence[str], found: Sequence[Entry | None]) -> list[trio.Event]:
        """What the answer has to wait for, of keys that were not found and are leaving."""
        leaving = self._leaving
        if not leaving:
            return []
        return [leaving[n] for n, e in zip(names, found, strict=True) if e is None and n in leaving]

    async def find(self, names: Sequence[str], temporaries: bool) -> list[Entry | None]:
        """The entries of keys, for an answer that a crash must not undo: what is leaving is waited for.

        Raises BackingError when the file system hangs.
        """
        found = self.lookup(names, temporaries)
        while departures := self._departures(names, found):
            await self.lane.step(departures[0].wait)
            found = self.lookup(names, temporaries)
        return found

    async def departed(self, prefix: str) -> None:
        """Wait for the keys with a prefix that are leaving now. Raises BackingError when the file system hangs."""
        for gone in [event for name, event in self._leaving.items() if name.startswith(prefix)]:
            await self.lane.step(gone.wait)

    async def open(
        self, session: Session, names: Sequence[str], temporaries: bool, verify: bool
    ) -> tuple[list[Entry | None], dict[int, KvcsError]]:
        """Pin what is found, and see that each has a descriptor in the session's table; None is a miss.

        The second result has the positions whose object file can't be opened; nothing is pinned for those. With
        `verify` what is unproven is read first, for a caller that serves the bytes as they are.
        """
        if verify and (doubtful := [e for e in self.lookup(names, temporaries) if e and not e.proven]):
            await self.lane.step(self.verifier.verify_entries, list(dict.fromkeys(doubtful)))
        found = await self.find(names, temporaries)
        hits = [e for e in found if e is not None]
        if hits:
            self.lane.check()
        self.hold(found, hits)
        table = self.descriptors.of(session.user)
        cold = list(dict.fromkeys(e for e in hits if e not in table))  # a key may come twice in a batch
        if not cold:
            return found, {}
        return await self.lane.step(self._open_cold, table, cold, found, undo=self._unopen)

    def hold(self, found: Sequence[Entry | None], hits: Sequence[Entry]) -> None:
        """Count what a lookup found, and pin it: somebody gets its descriptors."""
        self.counters["misses"] += len(found) - len(hits)
        self.counters["hits"] += len(hits)
        self.catalog.pin(hits)
        for entry in hits:
            entry.flags &= ~SOLE

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
                self.changed([entry.key])
        self.release(lost)
        await self.close_fds([*spare, *self.descriptors.surplus()])
        return found, errors

    async def descriptor(self, session: Session, entry: Entry) -> int:
        """The session's descriptor of a pinned entry. Raises BackingError, and the pin is gone."""
        entry.flags &= ~SOLE
        table = self.descriptors.of(session.user)
        if entry not in table:
            found, errors = await self._open_cold(table, [entry], [entry])
            if found[0] is None:
                raise errors.get(0) or BackingError("opening an object file: it is gone")
        return table[entry]

    def release(self, entries: Sequence[Entry]) -> None:
        """Give pins back; what left the index meanwhile is reclaimed in the background."""
        if self.catalog.unpin(entries):
            self.room.loose.set()

    # -- looking

    def _state(self) -> str:
        if self.lane.hung:
            return "hung"
        if self.recovering and not self.detached:
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
            "recovered_entries": self.upkeep.recovery.entries,
            "recovered_share": round(self.upkeep.recovery.share, 3),
            "scrub_total_bytes": self.scrub.total_bytes,
            "scrub_done_bytes": self.scrub.done_bytes,
            **self.counters,
        }

    def check(self) -> None:
        """Assert the invariants."""
        self.catalog.check()
