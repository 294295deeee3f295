"""The catalog against a plain model: a dict of values, a list for the order of use, and sums."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcsfs.engine.catalog import Catalog, FreeSlot
from kvcsfs.engine.entry import BLOCK, Entry, charge
from tests.stores import entry

pytestmark = pytest.mark.property

CAPACITY = 24 * BLOCK
KEYS = st.sampled_from(["a", "b", "c/1", "c/2", "c/d/3"])
SIZES = st.sampled_from([1, BLOCK, 2 * BLOCK, 5 * BLOCK])


@dataclasses.dataclass
class Model:
    """`order` has the live entries, the least recently used first; `files` what lies on the imagined disk."""

    order: list[Entry] = dataclasses.field(default_factory=list)
    staged: list[Entry] = dataclasses.field(default_factory=list)
    retired: list[Entry] = dataclasses.field(default_factory=list)
    free: list[FreeSlot] = dataclasses.field(default_factory=list)
    held: list[Entry] = dataclasses.field(default_factory=list)  # one item a pin


class CatalogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.catalog = Catalog(CAPACITY)
        self.model = Model()
        self.slots = 0

    def live(self, key: str) -> Entry | None:
        return next((e for e in self.model.order if e.key == key), None)

    @rule(batch=st.lists(st.tuples(KEYS, SIZES), min_size=1, max_size=4))
    def promise(self, batch: list[tuple[str, int]]) -> None:
        model, before = self.model, list(self.model.order)
        charges = [charge(size) for _, size in batch]
        plan = self.catalog.promise(charges)
        given_out = [*plan.reuse, *plan.recycle, *plan.create]
        assert sorted([*given_out, *plan.refused]) == list(range(len(batch))), "each position once"
        for i, slot in plan.reuse.items():
            assert slot in model.free and slot.size == charges[i]
        for i, victim in plan.recycle.items():
            assert victim.charged == charges[i]
        for slot in [*plan.reuse.values(), *plan.drop]:
            model.free.remove(slot)
        for victim in plan.victims:
            assert not victim.pins
            model.order.remove(victim)
        unpinned = [e for e in before if not e.pins]
        assert sorted(map(id, plan.victims)) == sorted(map(id, unpinned[: len(plan.victims)])), (
            "the oldest go"
        )
        for i in given_out:
            self.slots += 1
            model.staged.append(entry(batch[i][0], batch[i][1], self.slots))

    @rule(size=SIZES)
    def promise_alone_is_refused_only_if_it_can_not_be_had(self, size: int) -> None:
        pinned = sum(e.charged for e in self.model.order if e.pins)
        stuck = sum(e.charged for e in [*self.model.staged, *self.model.retired]) + pinned
        assert (charge(size) <= self.catalog.obtainable) == (charge(size) + stuck <= CAPACITY)

    @precondition(lambda self: self.model.staged)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        staged = data.draw(st.sampled_from(self.model.staged))
        self.model.staged.remove(staged)
        old = self.live(staged.key)
        assert self.catalog.insert(staged) is old
        if old is not None:
            self.model.order.remove(old)
            self.model.retired.append(old)
        self.model.order.append(staged)

    @precondition(lambda self: self.model.staged)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        staged = data.draw(st.sampled_from(self.model.staged))
        self.model.staged.remove(staged)
        self.catalog.retire_staged([staged])
        self.model.retired.append(staged)

    @rule(key=KEYS)
    def remove(self, key: str) -> None:
        if found := self.live(key):
            self.catalog.remove(found)
            self.model.order.remove(found)
            self.model.retired.append(found)

    @rule(old=KEYS, new=KEYS)
    def rename(self, old: str, new: str) -> None:
        found = self.live(old)
        if found and not self.live(new):
            self.catalog.rename(found, new, 1)

    @rule(batch=st.lists(KEYS, max_size=4, unique=True))
    def touch(self, batch: list[str]) -> None:
        found = [e for k in batch if (e := self.live(k))]
        self.catalog.touch(found, 0.0)
        self.model.order = [e for e in self.model.order if e not in found] + found[::-1]

    @rule(batch=st.lists(KEYS, min_size=1, max_size=4))
    def pin(self, batch: list[str]) -> None:
        found = [e for k in batch if (e := self.live(k))]
        self.catalog.pin(found)
        self.model.held += found

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.model.held))
        self.model.held.remove(held)
        loose = held not in self.model.held and held not in self.model.order
        assert self.catalog.unpin([held]) == [held] * loose

    @precondition(lambda self: self.model.retired)
    @rule(data=st.data(), keep=st.booleans())
    def reclaim(self, data: st.DataObject, keep: bool) -> None:
        gone = data.draw(st.sampled_from(self.model.retired))
        if gone.pins:
            return
        self.model.retired.remove(gone)
        kept = FreeSlot(gone.slot, gone.charged) if keep else None
        self.catalog.reclaimed(gone, kept)
        self.model.free += [kept] if kept else []

    @invariant()
    def adds_up(self) -> None:
        self.catalog.check()
        ledger, model = self.catalog.ledger, self.model
        assert ledger.used <= CAPACITY
        assert ledger.committed == sum(e.charged for e in model.order)
        assert ledger.reserved == sum(e.charged for e in model.staged)
        assert ledger.retired == sum(e.charged for e in model.retired)
        assert ledger.free_slots == sum(s.size for s in model.free)
        assert list(self.catalog.lru) == model.order
        assert {e.key: e for e in model.order} == {e.key: e for e in self.catalog.index.entries()}
        assert self.catalog.pinned == sum(e.charged for e in model.order if e in model.held)


TestCatalog = CatalogMachine.TestCase
TestCatalog.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
