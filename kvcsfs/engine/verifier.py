"""Verifier: reads the values of one mountpoint, compares them with their checksums, and drops what is wrong."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcsfs.engine import jobs
from kvcsfs.engine.entry import UNPROVEN, Entry

if TYPE_CHECKING:
    from kvcsfs.engine.volume import Volume

log = logging.getLogger(__name__)

VERIFY_ENTRIES = 256  # of one step of a verification


@dataclasses.dataclass(slots=True)
class Verified:
    """What one step of a verification read. `last` is the key where the next goes on, if there is `more`."""

    entries: int
    size_bytes: int
    dropped: list[str]
    last: str
    more: bool


class Verifier:
    """The verifier of a volume."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume

    async def verify(self, names: Sequence[str]) -> list[int]:
        """Read values and drop the wrong ones. Returns sizes; 0 for what is absent or was dropped."""
        entries = [self._volume.catalog.index.get(name) for name in names]
        await self.verify_entries([e for e in entries if e is not None])
        return [e.size if e is not None and e.live else 0 for e in entries]

    async def verify_after(self, after: str, limit_bytes: int) -> Verified:
        """Read the values of the keys that follow `after`, about `limit_bytes` of them, and drop what is wrong."""
        batch: list[Entry] = []
        page = self._volume.catalog.index.page("", after, VERIFY_ENTRIES)
        size = 0
        for entry in page:
            batch.append(entry)
            size += entry.size
            if size >= limit_bytes:
                break
        dropped = await self.verify_entries(batch, True)
        last = batch[-1].key if batch else ""
        more = len(batch) < len(page) or len(page) == VERIFY_ENTRIES
        return Verified(len(batch), size, [e.key for e in dropped], last, more)

    async def verify_entries(self, entries: Sequence[Entry], unreadable_too: bool = False) -> list[Entry]:
        """Read the values of entries in the index, drop the wrong ones and return them.

        What can't be read is dropped with `unreadable_too` alone: it may be right, and the trouble may end.
        """
        volume = self._volume
        volume.catalog.pin(entries)
        read = await volume.lane.run(jobs.verify_many, volume.store, entries)
        outcomes = dict(zip(entries, read, strict=True))
        wrong = [e for e in outcomes if outcomes[e] is False and e.live]
        unreadable = [e for e in outcomes if isinstance(outcomes[e], OSError) and e.live]
        for entry in entries:
            if outcomes[entry] is True:
                entry.flags &= ~UNPROVEN
        volume.counters["checksum_errors"] += len(wrong)
        volume.counters["io_errors"] += len(unreadable)
        if wrong:
            log.warning("%s: dropped %d entries with a wrong checksum", volume.config.path, len(wrong))
        if unreadable:
            log.warning("%s: %d entries can't be read", volume.config.path, len(unreadable))
        dropped = wrong + unreadable * unreadable_too
        for entry in dropped:
            volume.catalog.remove(entry)
        if dropped:
            volume.changed([e.key for e in dropped])
            await volume.room.discard(dropped)
        volume.release(entries)
        return dropped
