"""What one trip to a worker thread does: the file work of a whole batch. Blocking; touches no catalog.

Descriptors to close come along, since a slot can't be proven ours while we hold another descriptor of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Sequence

from kvcsfs.engine.catalog import Catalog, FreeSlot, Plan
from kvcsfs.engine.entry import SOLE, Entry, charge
from kvcsfs.engine.faults import point
from kvcsfs.engine.store import SlotStore
from kvcsfs.engine.syscalls import allocate, digest, failure
from kvcsfs.errors import ConfigError, KvcsError

log = logging.getLogger(__name__)

Prepared = tuple[int, int]  # slot, write-only descriptor


def close_many(_store: SlotStore, fds: Sequence[int]) -> list[None]:
    """Close descriptors, as a brief job."""
    close_all(fds)
    return [None] * len(fds)


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def make_room(store: SlotStore, plan: Plan) -> list[Entry]:
    """Remove what a plan gives up; returns the victims whose files could not be removed."""
    stuck: list[Entry] = []
    for free in plan.drop:
        drop(store, free)
        point("reserve.dropped")
    for victim in plan.unlink:
        if not _unlinked(store, victim.slot):
            stuck.append(victim)
        point("reserve.unlinked")
    return stuck


def stage_many(
    store: SlotStore, steps: Sequence[Entry | FreeSlot | None], charges: Sequence[int]
) -> list[Prepared | KvcsError]:
    """A staged file for each step of a plan: a victim to recycle, a free slot to reuse, None to make one.

    A victim whose recycling failed may still have its file.
    """
    staged: list[Prepared | KvcsError] = []
    for step, size in zip(steps, charges, strict=True):
        if isinstance(step, Entry):
            staged.append(_recycle(store, step, size))
        elif step is not None:
            staged.append(_reuse(store, step))
        else:
            staged.append(_create(store, size))
    return staged


def _recycle(store: SlotStore, victim: Entry, size: int) -> Prepared | KvcsError:
    try:
        fd = store.recycle(victim.slot, size, bool(victim.flags & SOLE))
    except OSError as exc:
        return failure(exc, "recycling a slot")
    return (victim.slot, fd) if fd is not None else _create(store, size)


def _create(store: SlotStore, size: int) -> Prepared | KvcsError:
    slot = store.directory.number()
    try:
        return slot, store.create(slot, size)
    except OSError as exc:
        return failure(exc, "making an object file")


def _reuse(store: SlotStore, free: FreeSlot) -> Prepared | KvcsError:
    try:
        return free.slot, free.fd if free.fd >= 0 else store.open_write(free.slot)
    except OSError:
        _unlinked(store, free.slot)
        return _create(store, free.size)


def drop(store: SlotStore, free: FreeSlot) -> None:
    """Remove a free slot; one that can't be removed is found again at the next scan."""
    if free.fd >= 0:
        os.close(free.fd)
    _unlinked(store, free.slot)


def _unlinked(store: SlotStore, slot: int) -> bool:
    try:
        store.unlink(slot)
    except OSError:
        return False
    return True


def create_file(store: SlotStore) -> Prepared:
    """A new slot file, empty, with a descriptor to read and write it: for a value of unknown size."""
    slot = store.directory.number()
    try:
        return slot, store.create_own(slot)
    except OSError as exc:
        raise failure(exc, "making an object file") from exc


def own_many(store: SlotStore, prepared: Sequence[Prepared]) -> list[Prepared | KvcsError]:
    """Staged files with descriptors of the daemon's own, which read, too, in place of those for a client."""
    owned: list[Prepared | KvcsError] = []
    for slot, fd in prepared:
        os.close(fd)
        try:
            owned.append((slot, store.open_own(slot)))
        except OSError as exc:
            _unlinked(store, slot)
            owned.append(failure(exc, "opening an object file"))
    return owned


def open_many(store: SlotStore, entries: Sequence[Entry]) -> list[int | OSError]:
    """A read-only descriptor for each entry, or why there is none."""
    opened: list[int | OSError] = []
    for entry in entries:
        try:
            opened.append(store.open_read(entry.slot))
        except OSError as exc:
            opened.append(exc)
    return opened


def seal_many(
    store: SlotStore, entries: Sequence[Entry], replaced: Sequence[Entry | None]
) -> list[KvcsError | None]:
    """Write the footers, then void those of the entries they replace. None, or why an object isn't committed.

    A durable store syncs between the two, as a power loss must leave the old value or the new one, and after them, as
    the old value must not come back once the new one is removed.
    """
    results = [_seal(store, entry) for entry in entries]
    if store.durable:
        _sync(store, entries, results)
    _void_replaced(store, [old for old, failed in zip(replaced, results, strict=True) if old and not failed])
    return results


def _seal(store: SlotStore, entry: Entry) -> KvcsError | None:
    try:
        point("commit.begun")
        store.seal(entry)
        point("commit.sealed")
    except KvcsError as exc:
        return exc
    except OSError as exc:
        return failure(exc, "committing an object")
    return None


def _sync(store: SlotStore, entries: Sequence[Entry], results: list[KvcsError | None]) -> None:
    """Make sealed objects durable, and fail those that can't be."""
    sealed = [i for i, failed in enumerate(results) if failed is None]
    for i, failed in zip(sealed, sync_many(store, [entries[i] for i in sealed]), strict=True):
        results[i] = failure(failed, "making an object durable") if failed else None
    point("commit.synced")


def sync_many(store: SlotStore, entries: Sequence[Entry]) -> list[OSError | None]:
    """Make objects and their names durable."""
    results: list[OSError | None] = []
    for entry in entries:
        try:
            store.sync(entry.slot)
            results.append(None)
        except FileNotFoundError:
            results.append(None)  # removed meanwhile: there is nothing to lose
        except OSError as exc:
            results.append(exc)
    try:
        store.sync_names(entry.slot for entry in entries)
    except OSError as exc:
        return [exc] * len(entries)
    return results


def _void_replaced(store: SlotStore, olds: Sequence[Entry]) -> None:
    """Void the footers of replaced entries. What replaced them stands if that fails: its generation is higher."""
    for old in olds:
        try:
            store.void(old)
            point("replaced.voided")
            if store.durable:
                store.sync(old.slot)
        except FileNotFoundError:
            continue
        except OSError as exc:
            log.warning("the footer of a replaced object can't be voided: %s", exc.strerror)


def grow_file(fd: int, size: int) -> KvcsError | None:
    """Take the blocks for `size` bytes of a file that grows. None, or why they can't be had."""
    try:
        allocate(fd, size, keep_size=True)
    except OSError as exc:
        return failure(exc, "growing an object file")
    return None


def examine(store: SlotStore, write: bool) -> tuple[bool, OSError | None]:
    """Whether the backing directory is where it was; and, with `write`, why it takes no writes (None: it does)."""
    if not store.directory.is_there():
        return False, None
    try:
        if write:
            store.directory.try_write()
    except OSError as exc:
        return True, exc
    return True, None


def let_go(fds: Iterable[int], catalog: Catalog) -> None:
    """Close what is open of a directory, whatever its file system says to that, and part the entries it had."""
    for fd in fds:
        with contextlib.suppress(OSError):  # it is closed even so: close(2)
            os.close(fd)
    catalog.dismantle()


def take_up(store: SlotStore) -> str:
    """Have the directory again that was given up; else why it can't be had."""
    try:
        store.take_up()
    except ConfigError as exc:
        return str(exc)
    return ""


def finish_file(fd: int, size: int, checksum: bytes | None) -> bytes:
    """Give a grown file its final size with padding of zeros, close it, and return the checksum of the value."""
    try:
        if os.fstat(fd).st_size != charge(size):  # else a slot of the right size was written again
            os.ftruncate(fd, size)
            point("file.cut")
            allocate(fd, charge(size))
            point("file.padded")
        return checksum if checksum is not None else digest(fd, size)
    except OSError as exc:
        raise failure(exc, "finishing an object file") from exc
    finally:
        os.close(fd)


def finish_many(
    _store: SlotStore, fds: Sequence[int], sizes: Sequence[int], checksums: Sequence[bytes]
) -> list[bytes]:
    """Do `finish_file` for files whose checksums are known, as a brief job."""
    return [finish_file(*columns) for columns in zip(fds, sizes, checksums, strict=True)]


def rename(store: SlotStore, entry: Entry, target: Entry | None) -> KvcsError | None:
    """Write the footer that gives a slot its new key, then void that of the entry it replaces."""
    try:
        point("rename.begun")
        store.write_footer(entry)
        point("rename.written")
        if store.durable:
            store.sync(entry.slot)
    except OSError as exc:
        return failure(exc, "renaming an object")
    _void_replaced(store, [target] if target else [])
    return None


def void_many(store: SlotStore, entries: Sequence[Entry]) -> list[OSError | None]:
    """Void footers, and make that durable in a durable store."""
    results: list[OSError | None] = []
    for entry in entries:
        try:
            point("remove.begun")
            store.void(entry)
            point("remove.voided")
            if store.durable:
                store.sync(entry.slot)
            results.append(None)
        except FileNotFoundError:
            results.append(None)
        except OSError as exc:
            results.append(exc)
    return results


def recycle_many(
    store: SlotStore, entries: Sequence[Entry], hold: Sequence[bool]
) -> list[FreeSlot | OSError | None]:
    """Make each file a free slot where the kernel allows it, which keeps its descriptor if `hold`; else unlink it.

    None: the file is gone. An OSError: it is still there.
    """
    results: list[FreeSlot | OSError | None] = []
    for entry, held in zip(entries, hold, strict=True):
        try:
            size = entry.charged
            point("remove.begun")
            fd = store.recycle(entry.slot, size, bool(entry.flags & SOLE))
            if fd is not None and not held:
                os.close(fd)
            results.append(None if fd is None else FreeSlot(entry.slot, size, fd if held else -1))
        except OSError as exc:
            results.append(None if _unlinked(store, entry.slot) else exc)
    return results


def unlink_many(store: SlotStore, entries: Sequence[Entry]) -> list[OSError | None]:
    """Remove files; an OSError for one that is still there."""
    results: list[OSError | None] = []
    for entry in entries:
        try:
            store.unlink(entry.slot)
            point("remove.unlinked")
            results.append(None)
        except OSError as exc:
            results.append(exc)
    return results


def verify_many(store: SlotStore, entries: Sequence[Entry]) -> list[bool | OSError]:
    """Read each value whole and compare its checksum."""
    results: list[bool | OSError] = []
    for entry in entries:
        try:
            results.append(store.verify(entry))
        except FileNotFoundError:
            results.append(False)
        except OSError as exc:
            results.append(exc)
    return results
