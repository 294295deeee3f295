"""The pure core: what a promise decides, and where bytes are after each change."""

from __future__ import annotations

import pytest

from kvcsfs.engine.catalog import Catalog, FreeSlot, Plan
from kvcsfs.engine.entry import BLOCK, Entry, charge
from tests.stores import entry

ONE = charge(1)  # 8 KiB, the smallest object


def filled(capacity_objects: int, *names: str, size: int = 1) -> Catalog:
    catalog = Catalog(capacity_objects * ONE)
    for i, name in enumerate(names):
        catalog.ledger.reserved += charge(size)
        catalog.insert(entry(name, size, slot=i))
    return catalog


def at(catalog: Catalog, key: str) -> Entry:
    found: Entry | None = catalog.index.get(key)
    assert found is not None
    return found


def free_slot(catalog: Catalog, size: int, slot: int = 99) -> FreeSlot:
    made = FreeSlot(slot, size)
    catalog.add_free(made)
    return made


def promised(catalog: Catalog, *charges: int) -> Plan:
    plan = catalog.promise(list(charges))
    catalog.check()
    assert catalog.ledger.used <= catalog.ledger.capacity
    return plan


def test_room_is_there():
    catalog = filled(3, "a")
    assert promised(catalog, ONE, ONE) == Plan(create=[0, 1])
    assert catalog.ledger.reserved == 2 * ONE


def test_a_free_slot_of_the_size_is_reused():
    catalog = filled(3)
    slot = free_slot(catalog, ONE)
    assert promised(catalog, ONE) == Plan(reuse={0: slot})
    assert (catalog.ledger.free_slots, catalog.ledger.reserved) == (0, ONE)


def test_free_slots_of_another_size_are_dropped_before_anything_is_evicted():
    catalog = filled(3, "a")
    slot = free_slot(catalog, 2 * ONE)
    assert promised(catalog, ONE) == Plan(create=[0], drop=[slot])
    assert catalog.index.get("a")


def test_a_victim_of_the_size_is_recycled():
    catalog = filled(2, "a", "b")
    a = at(catalog, "a")
    assert promised(catalog, ONE) == Plan(recycle={0: a})
    assert not a.live
    assert catalog.ledger.committed == ONE


def test_smaller_victims_are_unlinked_until_there_is_room():
    catalog = filled(3, "a", "b", "c")
    a, b = at(catalog, "a"), at(catalog, "b")
    assert promised(catalog, 2 * ONE) == Plan(create=[0], unlink=[a, b])
    assert catalog.index.get("c")


def test_a_larger_victim_is_unlinked_and_its_rest_stays_free():
    catalog = filled(2, "a", size=BLOCK * 2 + 1)
    plan = promised(catalog, ONE)
    assert [v.key for v in plan.unlink] == ["a"]
    assert plan.create == [0]
    assert catalog.ledger.free == ONE


def test_the_pinned_are_passed_over():
    catalog = filled(2, "a", "b")
    a, b = at(catalog, "a"), at(catalog, "b")
    catalog.pin([a])
    assert catalog.obtainable == ONE
    assert promised(catalog, ONE, ONE) == Plan(recycle={0: b}, refused=[1])
    assert a.live


def test_what_can_not_be_had_is_refused_and_evicts_nothing():
    catalog = filled(2, "a", "b")
    assert promised(catalog, 3 * ONE) == Plan(refused=[0])
    assert len(catalog.index) == 2


def test_a_refusal_does_not_stop_those_that_fit():
    catalog = filled(2)
    assert promised(catalog, ONE, 3 * ONE, ONE) == Plan(create=[0, 2], refused=[1])


def test_room_without_files():
    catalog = filled(2, "a", "b")
    a = at(catalog, "a")
    assert catalog.promise([ONE], files=False) == Plan(unlink=[a])
    catalog.check()


def test_replacing_retires_the_old_entry_until_it_is_reclaimed():
    catalog = filled(4, "a")
    old = at(catalog, "a")
    catalog.pin([old])
    promised(catalog, ONE)
    assert catalog.insert(entry("a", 1)) is old
    assert (catalog.ledger.committed, catalog.ledger.retired, catalog.pinned) == (ONE, ONE, 0)
    assert catalog.unpin([old]) == [old]
    catalog.reclaimed(old, FreeSlot(old.slot, ONE))
    assert (catalog.ledger.retired, catalog.ledger.free_slots) == (0, ONE)
    catalog.check()


def test_unpin_returns_only_what_nobody_holds_and_has_left():
    catalog = filled(2, "a", "b")
    a, b = at(catalog, "a"), at(catalog, "b")
    catalog.pin([a, a, b])
    catalog.remove(a)
    assert catalog.unpin([a, b]) == []
    assert catalog.unpin([a]) == [a]
    assert catalog.pinned == 0
    catalog.check()


def test_an_abort_retires_what_was_reserved():
    catalog = filled(2)
    promised(catalog, ONE)
    staged = entry("a", 1)
    catalog.retire_staged([staged])
    assert (catalog.ledger.reserved, catalog.ledger.retired) == (0, ONE)
    catalog.reclaimed(staged, None)
    assert catalog.ledger.used == 0
    catalog.check()


def test_rename_keeps_place_and_pins():
    catalog = filled(3, "a", "b")
    a = at(catalog, "a")
    catalog.pin([a])
    catalog.rename(a, "c/d", 7)
    assert (a.key, a.generation) == ("c/d", 7)
    assert [e.key for e in catalog.lru] == ["c/d", "b"]
    assert catalog.pinned == ONE
    catalog.check()


def test_within_a_batch_the_tail_is_the_first_to_go():
    catalog = filled(4, "other", "head", "middle", "tail")
    chain = [at(catalog, k) for k in ("head", "middle", "tail")]
    catalog.touch(chain, 5.0)
    assert [e.key for e in catalog.victims()] == ["other", "tail", "middle", "head"]


def test_load_takes_the_least_recently_used_first():
    catalog = Catalog(ONE)
    catalog.load([entry("b", 1), entry("a", 1)])
    assert [e.key for e in catalog.victims()] == ["b", "a"]
    assert catalog.ledger.free == -ONE
    assert catalog.promise([ONE]).refused == []
    catalog.check()


@pytest.mark.parametrize("size", [1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_charge_is_the_padded_value_and_a_footer(size):
    assert charge(size) % BLOCK == 0
    assert size + BLOCK <= charge(size) < size + 2 * BLOCK


def test_what_is_dismantled_holds_nothing():
    catalog = Catalog(1 << 20)
    entries = [entry(f"d/{i}", slot=i) for i in range(5)]
    catalog.load(entries)
    catalog.dismantle()
    assert len(catalog.index) == 0 and list(catalog.lru) == []
    assert not any(e.live or e.older or e.directory for e in entries)


def test_what_holds_a_catalog():
    catalog = Catalog(1 << 20)
    one = entry("one")
    catalog.load([one])
    assert not catalog.held
    catalog.pin([one])
    assert catalog.held
    catalog.remove(one)
    assert catalog.held and not catalog.pinned
    catalog.unpin([one])
    assert not catalog.held
    catalog.promise([8192])
    assert catalog.held
