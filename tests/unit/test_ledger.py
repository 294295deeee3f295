from __future__ import annotations

import pytest

from kvcsfs.engine.ledger import Ledger


def test_bytes_move_between_counters():
    ledger = Ledger(100)
    ledger.move(60, None, "reserved")
    ledger.move(40, "reserved", "committed")
    ledger.move(10, "committed", "retired")
    ledger.move(10, "retired", "free_slots")
    assert (ledger.committed, ledger.reserved, ledger.retired, ledger.free_slots) == (30, 20, 0, 10)
    assert (ledger.used, ledger.free) == (60, 40)
    ledger.move(10, "free_slots", None)
    assert ledger.used == 50
    ledger.check()


def test_a_counter_never_goes_below_zero():
    ledger = Ledger(100)
    ledger.move(10, None, "reserved")
    with pytest.raises(AssertionError, match="reserved would be -1"):
        ledger.move(11, "reserved", "committed")
    assert ledger.reserved == 10


def test_free_is_negative_when_the_capacity_was_lowered():
    ledger = Ledger(100)
    ledger.move(150, None, "committed")
    assert ledger.free == -50
    ledger.check()
