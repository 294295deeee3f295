"""A store that `COUNT` values of `VALUE` bytes fill, and whether its counters and the disk agree."""

from __future__ import annotations

from kvcsfs.engine.engine import Engine
from kvcsfs.engine.entry import BLOCK, Entry
from tests.stores import CAPACITY, bytes_on_disk

VALUE = (256 << 10) - BLOCK
COUNT = CAPACITY // (256 << 10)


async def entry_of(engine: Engine, key: str) -> Entry:
    (found,) = await engine.query_many(0, [key])
    assert found is not None
    return found


def adds_up(engine: Engine) -> None:
    """Counters, and a walk of the disk, agree."""
    engine.check()
    volume = engine.volumes[0]
    assert volume.catalog.ledger.used == bytes_on_disk(volume.config.path) <= CAPACITY
