"""How long a start takes: from a snapshot, and from footers alone with a warm cache. Prints figures; no limits."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import trio

from kvcsfs.config import Config, MountpointConfig
from kvcsfs.engine import footer, recovery
from kvcsfs.engine.engine import Engine
from kvcsfs.engine.entry import BLOCK, Entry
from kvcsfs.engine.store import SlotStore
from tests.stores import checksum, path_of

pytestmark = pytest.mark.bench

SCANNED = int(os.environ.get("KVCSFS_BENCH_SLOTS", "200000"))
SNAPSHOT = int(os.environ.get("KVCSFS_BENCH_ENTRIES", "1000000"))


def key(i: int) -> str:
    return f"model-70b/tp{i % 8}/{i * 0x9E3779B97F4A7C15 % (1 << 64):016x}"


async def started(path: Path) -> tuple[float, float, int]:
    """Seconds until the engine has everything, the longest gap of its event loop meanwhile, and the entries."""
    begun = time.monotonic()
    engine = Engine(Config((MountpointConfig(path, 1 << 50, scrub_rate=0),)))
    longest = 0.0
    async with engine.running():
        while engine.volumes[0].recovering:
            before = time.monotonic()
            await trio.sleep(0.001)
            longest = max(longest, time.monotonic() - before)
        seconds = time.monotonic() - begun
        return seconds, longest, len(engine.volumes[0].catalog.index)


async def test_from_footers(tmp_path):
    store = SlotStore(tmp_path)
    value = checksum(b"value")
    for i in range(SCANNED):
        slot = store.directory.number()
        block = footer.pack(key(i), 5, store.directory.number(), 1e9 + i, value)
        path_of(tmp_path, slot).write_bytes(b"value".ljust(BLOCK, b"\0") + block)
    store.close()
    for _ in range(3):
        seconds, longest, entries = await started(tmp_path)
        assert entries == SCANNED
        (tmp_path / "snapshot").unlink()
        print(
            f"footers: {entries / seconds:,.0f} entries/s, {seconds:.2f} s, longest gap {longest * 1e3:.0f} ms"
        )


async def test_from_a_snapshot(tmp_path):
    store = SlotStore(tmp_path)
    writer = recovery.SnapshotWriter(store.directory)
    value = checksum(b"value")
    for start in range(0, SNAPSHOT, recovery.SLICE):
        made = [Entry(key(i), i, 5, value, i, 1e9 + i) for i in range(start, start + recovery.SLICE)]
        writer.add(recovery.rows(made))
    writer.finish([], {}, clean=True)
    store.close()
    seconds, longest, entries = await started(tmp_path)
    assert entries == SNAPSHOT
    print(
        f"snapshot: {entries / seconds:,.0f} entries/s, {seconds:.2f} s, longest gap {longest * 1e3:.0f} ms"
    )
