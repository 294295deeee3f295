"""Scrub: verifies in the background what an unclean stop left unproven, at a bounded rate, the hottest first."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

import trio

from kvcsfs.engine.entry import Entry

log = logging.getLogger(__name__)

BATCH_ENTRIES = 64
BATCH_BYTES = 8 << 20  # read between two looks at the clock; one value may be larger

Verify = Callable[[Sequence[Entry]], Awaitable[object]]


class Scrub:
    """`rate`: bytes a second at most, 0 for no scrub. Readers verify by themselves whatever it has not come to yet."""

    def __init__(self, rate: int, verify: Verify) -> None:
        self.total_bytes = self.done_bytes = 0
        self._rate = rate
        self._verify = verify
        self._pending: list[Entry] = []
        self._work = trio.Event()

    def begin(self, entries: list[Entry]) -> None:
        """Take the unproven entries, the least recently used first."""
        self._pending = entries
        self.total_bytes, self.done_bytes = sum(e.size for e in entries), 0
        if entries:
            self._work.set()

    async def run(self) -> None:
        """Verify until nothing is pending, then wait for the next recovery."""
        while self._rate:
            await self._work.wait()
            self._work = trio.Event()
            log.info("verifying %d entries after an unclean stop", len(self._pending))
            while self._pending:
                begun = trio.current_time()
                size = await self._step()
                await trio.sleep_until(begun + size / self._rate)

    async def _step(self) -> int:
        """Verify a batch, and return the bytes that were read."""
        batch: list[Entry] = []
        passed = read = 0
        while self._pending and len(batch) < BATCH_ENTRIES and read < BATCH_BYTES:
            entry = self._pending.pop()
            passed += entry.size
            if entry.live and not entry.proven:
                batch.append(entry)
                read += entry.size
        await self._verify(batch)
        self.done_bytes += passed
        return read
