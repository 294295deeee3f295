"""`kvcsfs fsck`: reads every value of a store that no daemon serves, and drops what is wrong."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from kvcsfs.engine import recovery
from kvcsfs.engine.entry import UNPROVEN, Entry
from kvcsfs.engine.store import SlotStore
from kvcsfs.errors import ConfigError
from kvcsfs.progress import Progress

MIB = 1 << 20


@dataclasses.dataclass
class Result:
    """What a store holds, and what was removed from it. `leftovers`: files of no value, such as unfinished puts."""

    path: str
    entries: int = 0
    bytes: int = 0
    dropped: list[str] = dataclasses.field(default_factory=list)
    leftovers: int = 0


def fsck(path: Path, rate: int) -> Result:
    """Verify a store at `rate` bytes a second at most (0: no limit), and leave it as after a clean stop.

    Raises ConfigError: no store, or a daemon holds it.
    """
    if not (path / "VERSION").is_file():
        raise ConfigError(f"{path}: not a kvcsfs data directory, expected one that has a file VERSION")
    store = SlotStore(path)
    try:
        found = recovery.recover(store)
        result = Result(str(path), leftovers=found.removed)
        kept = _verified(store, found.entries, rate, result)
        kept.sort(key=lambda e: e.key)
        writer = recovery.SnapshotWriter(store.directory)
        for start in range(0, len(kept), recovery.SLICE):
            writer.add(recovery.rows(kept[start : start + recovery.SLICE]))
        writer.finish(found.free_slots, found.extras, clean=True)
        return result
    finally:
        store.close()


def _verified(store: SlotStore, entries: list[Entry], rate: int, result: Result) -> list[Entry]:
    """The entries that are right; the others' files are removed."""
    kept: list[Entry] = []
    with Progress(sum(e.size for e in entries) // MIB) as bar:
        for entry in entries:
            begun = time.monotonic()
            if _is_right(store, entry):
                entry.flags &= ~UNPROVEN
                kept.append(entry)
            else:
                result.dropped.append(entry.key)
                store.unlink(entry.slot)
            result.entries += 1
            result.bytes += entry.size
            bar.reach(result.bytes // MIB, f"MiB read, {len(result.dropped)} values dropped")
            if rate:
                time.sleep(max(0.0, begun + entry.size / rate - time.monotonic()))
    return kept


def _is_right(store: SlotStore, entry: Entry) -> bool:
    try:
        return store.verify(entry)
    except OSError:
        return False
