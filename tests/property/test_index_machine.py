"""The index against a plain dict."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcsfs.engine import keys
from kvcsfs.engine.entry import charge
from kvcsfs.engine.index import Index
from tests.stores import entry

pytestmark = pytest.mark.property

# Few characters, those around "/" among them ("." and "0" are its neighbours), so that keys share directories.
NAMES = st.text("ab./0é", min_size=1, max_size=6)
PREFIXES = st.text("ab./0é", max_size=4)


def children_of(names: set[str], path: str) -> list[str]:
    """The plain answer: what directly lies in a directory, as keys in order meet it."""
    met: dict[str, None] = {}
    for key in sorted(names):
        if key.startswith(path):
            name, slash, _ = key[len(path) :].partition("/")
            met[name + slash] = None
    return list(met)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.model: dict[str, int] = {}

    @initialize(sizes=st.dictionaries(NAMES, st.integers(1, 20_000), max_size=8))
    def load(self, sizes: dict[str, int]) -> None:
        self.index.load([entry(k, s) for k, s in sizes.items()])
        self.model = dict(sizes)

    @rule(key=NAMES, size=st.integers(1, 20_000))
    def add(self, key: str, size: int) -> None:
        if key not in self.model:
            self.index.add(entry(key, size))
            self.model[key] = size

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.model:
            key = data.draw(st.sampled_from(sorted(self.model)))
            found = self.index.get(key)
            assert found is not None
            self.index.remove(found)
            del self.model[key]

    @rule(prefix=PREFIXES)
    def usage(self, prefix: str) -> None:
        sizes = [s for k, s in self.model.items() if k.startswith(prefix)]
        assert self.index.usage(prefix) == (len(sizes), sum(sizes), sum(map(charge, sizes)))

    @rule(prefix=PREFIXES, after=PREFIXES, limit=st.integers(1, 4))
    def page(self, prefix: str, after: str, limit: int) -> None:
        expected = [k for k in sorted(self.model) if k.startswith(prefix) and (k > after or not after)]
        assert [e.key for e in self.index.page(prefix, after, limit)] == expected[:limit]

    @rule(key=NAMES)
    def children(self, key: str) -> None:
        for path in keys.parents(key):
            names = children_of(set(self.model), path)
            assert list(self.index.children(path)) == names
            assert self.index.is_directory(path) == (bool(names) or path == "")
            for i, name in enumerate(names):
                if name:  # a key that ends with a slash has an empty name, which can't be resumed by
                    assert list(self.index.children(path, name)) == names[i + 1 :]

    @invariant()
    def holds(self) -> None:
        self.index.check()
        assert len(self.index) == len(self.model)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@given(st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_parents_go_up_to_the_root(key):
    parents = list(keys.parents(key))
    assert parents[0] == keys.directory(key)
    assert parents[-1] == ""
    assert all(key.startswith(p) and (p == "" or p.endswith("/")) for p in parents)
    assert len(parents) == key.count("/") + 1
    assert [keys.directory(p[:-1]) for p in parents[:-1]] == parents[1:]


@given(st.text(max_size=8), st.text("abcdefgh01234567", min_size=8, max_size=8))
@settings(max_examples=200, deadline=None)
def test_the_quick_way_to_tell_a_temporary_name_is_right(name, random):
    for key in (name, f"{name}.tmp", f"m/{name}.tmp{random}", f".o_direct_probe_{name}"):
        last = key.rpartition("/")[2]
        slow = last.endswith(".tmp") or last[-12:-8] == ".tmp" or last.startswith(".o_direct_probe_")
        assert keys.is_temporary(key) == slow
