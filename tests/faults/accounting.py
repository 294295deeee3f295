"""Whether a store's counters, its index and its disk agree."""

from __future__ import annotations

from kvcsfs.engine.engine import Engine
from kvcsfs.engine.entry import Entry
from tests.stores import CAPACITY, bytes_on_disk


async def entry_of(engine: Engine, key: str) -> Entry:
    (found,) = await engine.query_many(0, [key])
    assert found is not None
    return found


def adds_up(engine: Engine) -> None:
    """Counters, and a walk of the disk, agree."""
    engine.check()
    volume = engine.volumes[0]
    assert volume.catalog.ledger.used == bytes_on_disk(volume.config.path) <= CAPACITY
