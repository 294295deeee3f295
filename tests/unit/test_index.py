from __future__ import annotations

import pytest

from kvcsfs.engine.entry import charge
from kvcsfs.engine.index import Index
from kvcsfs.engine.keys import MAX_KEY_BYTES
from tests.stores import entry


def index_of(*names: str) -> Index:
    index = Index()
    for name in names:
        index.add(entry(name))
    return index


def test_children_in_key_order_each_once():
    index = index_of("a", "a-b", "a/b", "a/c/d", "a/c/e", "a0", "b/x/y")
    assert list(index.children("")) == ["a", "a-b", "a/", "a0", "b/"]
    assert list(index.children("a/")) == ["b", "c/"]
    assert list(index.children("b/")) == ["x/"]
    assert list(index.children("none/")) == []
    index.check()


@pytest.mark.parametrize("path", ["", "a/"])
def test_children_resume_after_each_name(path):
    index = index_of("a", "a-b", "a/b", "a/b/c", "a/b0", "a/c/d", "a0", "z//y")
    names = list(index.children(path))
    for i, name in enumerate(names):
        assert list(index.children(path, name)) == names[i + 1 :]


def test_children_resume_after_a_name_that_is_gone():
    index = index_of("a", "c/x", "e")
    assert list(index.children("", "b")) == ["c/", "e"]
    assert list(index.children("", "b/")) == ["c/", "e"]


def test_empty_components():
    index = index_of("a//b", "a/b", "/c", "d/")
    assert list(index.children("")) == ["/", "a/", "d/"]
    assert list(index.children("a/")) == ["/", "b"]
    assert list(index.children("a//")) == ["b"]
    assert list(index.children("d/")) == [""]
    index.check()


def test_usage_of_directories_and_prefixes():
    index = index_of("m/a", "m/b", "m/sub/c", "mm")
    assert index.usage("") == (4, 400, 4 * charge(100))
    assert index.usage("m/") == (3, 300, 3 * charge(100))
    assert index.usage("m/sub/") == (1, 100, charge(100))
    assert index.usage("m") == (4, 400, 4 * charge(100))
    assert index.usage("m/sub") == (1, 100, charge(100))
    assert index.usage("x/") == index.usage("x") == (0, 0, 0)


def test_a_directory_goes_with_its_last_key():
    index = index_of("a/b/c", "a/d")
    found = index.get("a/b/c")
    assert found is not None
    index.remove(found)
    assert not index.is_directory("a/b/")
    assert index.is_directory("a/")
    index.check()


def test_pages_go_on_after_a_key():
    index = index_of("a", "b/1", "b/2", "b/3", "c")
    assert [e.key for e in index.page("b/", "", 2)] == ["b/1", "b/2"]
    assert [e.key for e in index.page("b/", "b/2", 2)] == ["b/3"]
    assert [e.key for e in index.page("b/", "zzz", 2)] == []
    assert [e.key for e in index.page("b/", "a", 9)] == ["b/1", "b/2", "b/3"]
    assert [e.key for e in index.page("b/1", "b/1", 9)] == []
    assert [e.key for e in index.page("", "", 9)] == ["a", "b/1", "b/2", "b/3", "c"]


def test_load_counts_like_add():
    index = Index()
    index.load([entry("b/x"), entry("a")])
    index.add(entry("b/y"))
    assert [e.key for e in index.entries()] == ["a", "b/x", "b/y"]
    assert index.usage("b/")[0] == 2
    index.check()


def test_a_listing_goes_on_behind_a_name_that_is_empty():
    index = Index()
    for key in ("x/", "x/a", "x//b", "x/c/d"):
        index.add(entry(key))
    names: list[str] = []
    while (found := next(index.children("x/", names[-1] if names else None), None)) is not None:
        names.append(found)
    assert names == ["", "/", "a", "c/"]


def test_a_key_may_have_as_many_components_as_bytes():
    index = Index()
    deep = "/" * MAX_KEY_BYTES
    index.load([entry(deep)])
    index.add(entry("/" * 500 + "x" * 524))
    index.check()
    assert index.usage(deep[:1000]) == (1, 100, charge(100))
    for key in [e.key for e in index.entries()]:
        found = index.get(key)
        assert found is not None
        index.remove(found)
    index.check()
