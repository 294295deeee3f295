"""What a file tree has beyond its keys, against a plain set."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcsfs.engine.namespace import Namespace


def everything(namespace: Namespace, path: str) -> list[str]:
    return list(namespace.children(path, None))


def test_made_directories_are_there_until_removed():
    namespace = Namespace({})
    namespace.make("a/b/", {"mode": 0o700})
    assert namespace.is_directory("a/")
    assert namespace.is_directory("a/b/")
    assert not namespace.is_directory("a/c/")
    assert not namespace.is_directory("a/b/c/")
    assert everything(namespace, "") == ["a/"]
    assert everything(namespace, "a/") == ["b/"]
    assert everything(namespace, "a/b/") == []
    assert namespace.directory_attributes("a/b/") == {"mode": 0o700}
    namespace.move_directory("a/b/", "c/")
    assert not namespace.is_directory("a/")
    assert namespace.directory_attributes("c/") == {"mode": 0o700}
    namespace.remove_directory("c/")
    assert everything(namespace, "") == []
    namespace.check()


def test_an_empty_file_with_an_empty_name_lies_in_a_directory():
    namespace = Namespace({})
    namespace.set_empty("a/", 1)
    assert namespace.is_directory("a/")
    assert everything(namespace, "") == ["a/"]
    assert everything(namespace, "a/") == [""]


def test_a_changed_directory_stays_and_has_a_new_time():
    namespace = Namespace({})
    namespace.changed("", 1)
    namespace.changed("a/", 2)
    namespace.set_directory("a/", {"mode": 0o700})
    namespace.changed("a/", 3)
    assert namespace.directory_attributes("a/") == {"mode": 0o700, "mtime_ns": 3, "ctime_ns": 3}
    assert everything(namespace, "") == ["a/"]


def test_a_file_from_its_creation_to_its_value():
    data: dict[str, object] = {}
    namespace = Namespace(data)
    namespace.create("a/f", {"mode": 0o600})
    assert namespace.is_file("a/f")
    assert namespace.is_directory("a/")
    assert everything(namespace, "a/") == ["f"]
    assert "a/f" not in str(data)  # a crash must not leave it
    namespace.set_empty("a/f", 5)
    assert namespace.attributes("a/f") == {"mode": 0o600, "mtime_ns": 5, "atime_ns": 5, "ctime_ns": 5}
    assert "a/f" in str(data)
    namespace.set_value("a/f", 6)
    assert not namespace.is_file("a/f")
    assert namespace.attributes("a/f") == {"mode": 0o600}
    assert namespace.forget("a/f") == {"mode": 0o600}
    assert not namespace.knows("a/f")
    namespace.check()


def test_times_that_were_set_last_the_next_write_but_not_the_one_before():
    namespace = Namespace({})
    namespace.create("f", {})
    namespace.set_file("f", {"mtime_ns": 1, "ctime_ns": 100})
    namespace.set_value("f", 99)
    assert namespace.attributes("f")["mtime_ns"] == 1
    namespace.set_value("f", 101)
    assert not namespace.knows("f")


@pytest.mark.parametrize("state", ["pending", "empty", "value"])
def test_a_file_moves_with_what_was_set(state):
    namespace = Namespace({})
    namespace.create("old", {"uid": 7})
    if state == "empty":
        namespace.set_empty("old", 0)
    if state == "value":
        namespace.set_value("old", 0)
    namespace.create("new", {"uid": 8})
    namespace.move_file("old", "new")
    assert namespace.attributes("new")["uid"] == 7
    assert namespace.is_file("new") == (state != "value")
    assert not namespace.knows("old")
    namespace.check()


def test_it_survives_a_snapshot():
    data: dict[str, object] = {}
    namespace = Namespace(data)
    namespace.make("d/", {"mode": 0o700})
    namespace.create("e", {})
    namespace.set_empty("e", 1)
    namespace.set_file("v", {"uid": 3, "ctime_ns": 2})
    namespace.create("pending", {})
    again = Namespace(json.loads(json.dumps(data)))
    again.check()
    assert everything(again, "") == ["d/", "e"]
    assert again.attributes("v") == {"uid": 3, "ctime_ns": 2}
    assert not again.knows("pending")


PART = st.text("ab-0", min_size=1, max_size=2)
PATH = st.lists(PART, min_size=1, max_size=3).map("/".join)
PATHS = st.sets(PATH, max_size=12)
FILES = st.sets(PATH | PATH.map("{}/".format), max_size=12)  # the last component may be empty


@given(PATHS, FILES, st.lists(PART, max_size=2).map(lambda parts: "".join(p + "/" for p in parts)), st.data())
def test_children_against_a_plain_set(directories, files, path, data):
    namespace = Namespace({})
    for name in directories:
        namespace.make(name + "/", {})
    for name in files:
        namespace.create(name, {})
    expected = set()
    for name in [d + "/" for d in directories] + list(files):
        if name.startswith(path) and (name != path or name in files):
            child, slash, _ = name[len(path) :].partition("/")
            expected.add(child + slash)
    listed = sorted(expected)
    assert everything(namespace, path) == listed
    after = data.draw(st.sampled_from([None, *listed]))
    assert list(namespace.children(path, after)) == [n for n in listed if after is None or n > after]
    assert namespace.is_directory(path) == (bool(expected) or path[:-1] in directories) or not path
    namespace.check()
