from __future__ import annotations

import pytest

from kvcsfs.engine.ledger import Ledger


def test_used_and_free_follow_from_the_counters():
    ledger = Ledger(100)
    ledger.committed, ledger.reserved, ledger.retired, ledger.free_slots = 30, 20, 4, 6
    assert (ledger.used, ledger.free) == (60, 40)
    ledger.check()


def test_a_counter_never_goes_below_zero():
    ledger = Ledger(100)
    ledger.reserved -= 1
    with pytest.raises(AssertionError, match="reserved"):
        ledger.check()


def test_free_is_negative_when_the_capacity_was_lowered():
    ledger = Ledger(100)
    ledger.committed = 150
    assert ledger.free == -50
    ledger.check()
