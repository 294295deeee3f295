"""What one trip to a worker thread does: the file work of a whole batch. Blocking; touches no catalog.

Descriptors to close come along, since a slot can't be proven ours while we hold another descriptor of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from kvcsfs.engine.catalog import FreeSlot, Plan
from kvcsfs.engine.entry import Entry, charge
from kvcsfs.engine.faults import point
from kvcsfs.engine.store import SlotStore, digest, failure
from kvcsfs.errors import KvcsError

Prepared = tuple[int, int]  # slot, write-only descriptor


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def prepare(
    store: SlotStore, plan: Plan, charges: Sequence[int], closing: Sequence[int]
) -> tuple[list[Prepared | KvcsError | None], list[Entry]]:
    """Carry a plan out.

    Returns by position a staged file, a failure, or None for what was refused; and the victims whose files could
    not be removed.
    """
    point("reserve.promised")
    close_all(closing)
    stuck: list[Entry] = []
    for victim in plan.unlink:
        if not _unlinked(store, victim.slot):
            stuck.append(victim)
        point("reserve.unlinked")
    for free in plan.drop:
        drop(store, free)
        point("reserve.dropped")
    done: list[Prepared | KvcsError | None] = [None] * len(charges)
    for i, victim in plan.recycle.items():
        done[i] = _recycle(store, victim, charges[i], stuck)
    for i, free in plan.reuse.items():
        done[i] = _reuse(store, free)
    for i in plan.create:
        done[i] = _create(store, charges[i])
    return done, stuck


def _recycle(store: SlotStore, victim: Entry, size: int, stuck: list[Entry]) -> Prepared | KvcsError:
    try:
        fd = store.recycle(victim.slot, size)
        return (victim.slot, fd) if fd is not None else _create(store, size)
    except OSError as exc:
        if not _unlinked(store, victim.slot):
            stuck.append(victim)
        return failure(exc, "recycling a slot")


def _create(store: SlotStore, size: int) -> Prepared | KvcsError:
    slot = store.number()
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
    slot = store.number()
    try:
        return slot, store.create_own(slot)
    except OSError as exc:
        raise failure(exc, "making an object file") from exc


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
    olds: list[Entry] = []
    for i, old in enumerate(replaced):
        if old is None or results[i] is not None:
            continue
        try:
            store.void(old)
            point("commit.voided")
            olds.append(old)
        except OSError as exc:
            results[i] = failure(exc, "committing an object")
    if store.durable:
        sync_many(store, olds)
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


def finish_file(fd: int, size: int, checksum: bytes | None) -> bytes:
    """Give a grown file its final size with padding of zeros, close it, and return the checksum of the value."""
    try:
        os.ftruncate(fd, size)
        point("file.cut")
        os.ftruncate(fd, charge(size))
        point("file.padded")
        return checksum if checksum is not None else digest(fd, size)
    except OSError as exc:
        raise failure(exc, "finishing an object file") from exc
    finally:
        os.close(fd)


def rename(store: SlotStore, entry: Entry, target: Entry | None) -> KvcsError | None:
    """Write the footer that gives a slot its new key, then void that of the entry it replaces."""
    try:
        point("rename.begun")
        store.write_footer(entry)
        point("rename.written")
        if store.durable:
            store.sync(entry.slot)
        if target is not None:
            store.void(target)
            point("rename.voided")
            if store.durable:
                store.sync(target.slot)
    except OSError as exc:
        return failure(exc, "renaming an object")
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


def reclaim(
    store: SlotStore, entries: Sequence[Entry], keep: Sequence[bool], hold: int, closing: Sequence[int]
) -> list[FreeSlot | OSError | None]:
    """Make each file a free slot where `keep` says so and the kernel allows it, else unlink it.

    The first `hold` free slots keep their descriptor. None: the file is gone. An OSError: it is still there.
    """
    close_all(closing)
    results: list[FreeSlot | OSError | None] = []
    for entry, kept in zip(entries, keep, strict=True):
        try:
            size = charge(entry.size)
            point("remove.begun")
            fd = store.recycle(entry.slot, size) if kept else None
            if not kept:
                store.unlink(entry.slot)
                point("remove.unlinked")
            if fd is None:
                results.append(None)
                continue
            if hold <= 0:
                os.close(fd)
                fd = -1
            hold -= 1
            results.append(FreeSlot(entry.slot, size, fd))
        except OSError as exc:
            results.append(None if _unlinked(store, entry.slot) else exc)
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
