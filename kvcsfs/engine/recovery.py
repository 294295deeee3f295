"""Snapshot and recovery: from what lies on disk to the entries of a catalog. Blocking; runs in a worker thread.

The slots are the truth. A snapshot written at a clean stop is exact, and saves reading the footers; any other
only tells the order of use. It is clean for one start only: the next one begins a new epoch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import xxhash

from kvcsfs.engine import scan
from kvcsfs.engine.catalog import Catalog, FreeSlot
from kvcsfs.engine.directory import Directory, boot_id
from kvcsfs.engine.entry import SOLE, UNPROVEN, Entry, flags_of
from kvcsfs.engine.faults import point
from kvcsfs.engine.store import SlotStore
from kvcsfs.engine.syscalls import SAFE

log = logging.getLogger(__name__)

SLICE = 2000  # entries collected in one go on the event loop: below 5 ms
FORMAT = 1

# key, slot, size, checksum, generation, created, used, hits, flags
Row = tuple[str, int, int, bytes, int, float, float, int, int]


class Tail(msgspec.Struct):
    """The last block of a snapshot."""

    format: int
    epoch: int
    boot: str
    clean: bool
    free_slots: list[tuple[int, int]]
    extras: dict[str, Any]


@dataclasses.dataclass(slots=True)
class Found:
    """What recovery found. `load` puts the entries in order of use."""

    entries: list[Entry]
    free_slots: list[FreeSlot]
    extras: dict[str, Any]
    clean: bool
    removed: int = 0  # files of no value


def rows(entries: Iterable[Entry]) -> list[Row]:
    """The snapshot's rows of entries."""
    return [
        (e.key, e.slot, e.size, e.checksum, e.generation, e.created, e.used, e.hits, e.flags) for e in entries
    ]


class SnapshotWriter:
    """Writes a snapshot beside the last one and renames it over that.

    Blocks of msgpack, each behind its length and checksum; an empty block parts the rows from the tail.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._file = open("snapshot.new", "wb", opener=_below(directory.root))  # noqa: SIM115 closed by finish
        point("snapshot.begun")

    def add(self, block: Sequence[Row]) -> None:
        """Append rows."""
        self._write(msgspec.msgpack.encode(block))

    def finish(self, free: Iterable[FreeSlot], extras: dict[str, Any], clean: bool) -> None:
        """Append the tail, make it durable and put it in place."""
        tail = Tail(FORMAT, self._directory.epoch, boot_id(), clean, [(s.slot, s.size) for s in free], extras)
        self._write(b"")
        self._write(msgspec.msgpack.encode(tail))
        root = self._directory.root
        with self._file as file:
            file.flush()
            point("snapshot.written")
            os.fsync(file.fileno())
        point("snapshot.synced")
        os.replace("snapshot.new", "snapshot", src_dir_fd=root, dst_dir_fd=root)
        point("snapshot.renamed")
        os.fsync(root)

    def abandon(self) -> None:
        """Remove what was written; the last snapshot stays."""
        with contextlib.suppress(OSError):  # what is buffered may not fit: it is not wanted
            self._file.close()
        with contextlib.suppress(OSError):
            os.unlink("snapshot.new", dir_fd=self._directory.root)

    def _write(self, block: bytes) -> None:
        self._file.write(len(block).to_bytes(4, "little") + xxhash.xxh3_64_digest(block) + block)


def _below(root: int) -> Callable[[str, int], int]:
    """Opens files of the directory whose descriptor is `root`, as its path may lead elsewhere by now; no links."""
    return lambda name, flags: os.open(name, flags | SAFE, 0o600, dir_fd=root)


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    left = os.fstat(file.fileno()).st_size
    while head := file.read(12):
        size = int.from_bytes(head[:4], "little")
        left -= len(head) + size
        if left < 0:  # before a read, which would take memory for all of it
            raise ValueError("a block that is longer than the file")
        block = file.read(size)
        if xxhash.xxh3_64_digest(block) != head[4:]:
            raise ValueError("a damaged block")
        yield block


def read_snapshot(root: int, path: Path, watch: Watch) -> tuple[list[Row], Tail] | None:
    """The rows and the tail of a snapshot; None if there is none or it is damaged, which is logged.

    `root` is a descriptor of its directory, whose path is for people.
    """
    try:
        with open("snapshot", "rb", opener=_below(root)) as file:
            return _parse(file, watch)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError) as exc:
        log.warning("%s/snapshot: not used, the footers are read instead: %s", path, exc)
        return None


def _parse(file: IO[bytes], watch: Watch) -> tuple[list[Row], Tail]:
    decoder = msgspec.msgpack.Decoder(list[Row])
    found: list[Row] = []
    size = max(os.fstat(file.fileno()).st_size, 1)
    blocks = _blocks(file)
    for block in blocks:
        if not block:
            break
        found += decoder.decode(block)
        watch.passed(len(found), len(found) * len(block) / size / SLICE)
    tail = msgspec.msgpack.decode(next(blocks, b""), type=Tail)
    if tail.format != FORMAT:
        raise ValueError(f"format {tail.format}")
    if next(blocks, None) is not None:
        raise ValueError("more behind the last block")
    return found, tail


class Stopped(Exception):
    """The daemon stops while recovery runs."""


class Watch:
    """How far a recovery is, for another thread to look at: entries that were read, and which share of all they are.

    Setting `stopped` ends it soon, by Stopped.
    """

    def __init__(self) -> None:
        self.entries, self.share, self.stopped = 0, 0.0, False

    def passed(self, entries: int, share: float) -> None:
        """Tell, and see whether to go on."""
        self.entries, self.share = entries, min(share, 1.0)
        if self.stopped:
            raise Stopped


def recover(store: SlotStore, watch: Watch | None = None) -> Found:
    """Find every committed value of a store, and remove what is left of others. Raises OSError, Stopped."""
    watch = watch or Watch()
    snapshot = read_snapshot(store.directory.root, store.directory.path, watch)
    extras = snapshot[1].extras if snapshot else {}
    if snapshot and snapshot[1].clean and snapshot[1].epoch == store.directory.previous_epoch:
        doubt = 0 if store.directory.previous_boot == boot_id() else UNPROVEN
        entries = [_entry(row, doubt) for row in snapshot[0]]
        free = [FreeSlot(slot, size) for slot, size in snapshot[1].free_slots]
        found = Found(entries, free, extras, clean=True)
    else:
        known = {row[1]: row for row in snapshot[0]} if snapshot else {}
        found = _scan(store, known, watch)
        found.extras = extras
        store.directory.resume_after(max((e.generation for e in found.entries), default=0))
    point("recovery.read")
    return found


def _entry(row: Row, doubt: int) -> Entry:
    key, slot, size, checksum, generation, created, used, hits, flags = row
    entry = Entry(key, slot, size, checksum, generation, created, flags & ~SOLE | doubt)
    entry.used, entry.hits = used, hits
    return entry


def _scan(store: SlotStore, known: dict[int, Row], watch: Watch) -> Found:
    """Entries from footers: of two with one key the higher generation wins. All else is unlinked."""
    best: dict[str, Entry] = {}
    leftovers: list[int] = []
    for number, folder in enumerate(scan.scan(store.slots)):
        for complaint in folder.complaints:
            log.warning("%s/slots/%s", store.directory.path, complaint)
        leftovers += folder.leftovers
        for slot, key, size, checksum, generation, created in folder.rows:
            entry = Entry(key, slot, size, checksum, generation, created, UNPROVEN | flags_of(key))
            row = known.get(slot)
            if row is not None and row[3] == checksum:  # the same value, perhaps renamed since
                entry.used, entry.hits = max(row[6], created), row[7]
            other = best.get(key)
            if other is not None:
                entry, other = (other, entry) if other.generation > generation else (entry, other)
                leftovers.append(other.slot)
            best[key] = entry
        watch.passed(len(best), (number + 1) / scan.FOLDERS)
    for slot in leftovers:
        _unlink(store, slot)
    return Found(list(best.values()), [], {}, clean=False, removed=len(leftovers))


def load(found: Found, capacity: int) -> Catalog:
    """The catalog of what was found, whose entries are then in order of use, the least recently used first."""
    catalog = Catalog(capacity)
    catalog.load(found.entries)
    for slot in found.free_slots:
        catalog.add_free(slot)
    return catalog


def _unlink(store: SlotStore, slot: int) -> None:
    """Remove a file of no value; one that can't be removed must not stop the start."""
    try:
        store.unlink(slot)
        point("recovery.unlinked")
    except OSError as exc:
        log.warning("%s: slot %x can't be removed: %s", store.directory.path, slot, exc.strerror)
