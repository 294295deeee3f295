from __future__ import annotations

from kvcsfs.engine.lru import Lru
from tests.stores import entry


def filled(*names: str) -> Lru:
    lru = Lru()
    for name in names:
        lru.add(entry(name))
    return lru


def order(lru: Lru) -> list[str]:
    lru.check()
    return [e.key for e in lru]


def test_the_oldest_comes_first():
    assert order(filled("a", "b", "c")) == ["a", "b", "c"]


def test_touch_moves_to_the_end_in_the_order_given():
    lru = filled("a", "b", "c")
    a, b, _ = lru
    lru.touch([b, a])
    assert order(lru) == ["c", "b", "a"]
    lru.touch([a])
    assert order(lru) == ["c", "b", "a"]


def test_touch_passes_over_what_has_left():
    lru = filled("a", "b")
    a, b = lru
    lru.remove(a)
    lru.touch([a, b])
    assert order(lru) == ["b"]
    assert not a.live


def test_the_yielded_entry_may_be_removed():
    lru = filled("a", "b", "c")
    for e in lru:
        lru.remove(e)
    assert order(lru) == []
