"""An engine's ledger, and a value that fills a sixteenth of one."""

from __future__ import annotations

from kvcsfs.engine.engine import Engine
from kvcsfs.engine.entry import BLOCK

OBJECT = 256 << 10  # charged bytes of a value that fills 16 to the store
VALUE = OBJECT - BLOCK


def ledger(engine: Engine, index: int = 0):
    return engine.volumes[index].catalog.ledger
