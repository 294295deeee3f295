"""The escape: every key has one path, every path one key."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcsfs.fuse import names
from kvcsfs.fuse.names import Kind

LONG = "é" * 200 + "x" * 300
COMPONENT = st.one_of(
    st.sampled_from(
        ["", ".", "..", ".mountpoints", "%", "%0", "%%", "%+x", "%=x", "%-", "a", "a" * 255, "a" * 256, LONG]
    ),
    st.text(st.characters(exclude_characters="\0/", exclude_categories=("Cs",)), max_size=300),
    st.builds(str.__mul__, st.sampled_from(["é", "x", "\U0001f600", "%"]), st.integers(80, 400)),
)
KEY = st.lists(COMPONENT, min_size=1, max_size=4).map("/".join).filter(lambda k: 0 < len(k.encode()) <= 1024)


def path_of(key: str, clash: bool) -> list[str]:
    """The names on the way to a key; `clash`: its own component is a directory, too."""
    *directories, last = key.split("/")
    path: list[str] = []
    for component in directories:
        path += names.encode(component, top=not path)
    return path + list(names.encode_clash(last) if clash else names.encode(last, top=not path))


def key_of(path: list[str]) -> tuple[str, bool] | None:
    """Walk down as lookups do: the key, and whether its name is that of a clash; None for no path of a key."""
    components: list[str] = []
    partial, kind = "", Kind.NAME
    for i, name in enumerate(path):
        if kind is Kind.CLASH:
            return None
        found = names.decode(name, partial, top=i == 0)
        if found is None:
            return None
        kind = found.kind
        if kind is Kind.CHUNK:
            partial = found.component
        else:
            components.append(found.component)
            partial = ""
    return None if kind is Kind.CHUNK else ("/".join(components), kind is Kind.CLASH)


@given(KEY, st.booleans())
@example(".mountpoints", False)
@example(".mountpoints", True)
@example("a/.mountpoints/b", False)
@example("a" * 254, True)
@example("%" + "0" * 254, False)
@example("/", True)
def test_every_key_has_a_path_that_leads_back(key, clash):
    path = path_of(key, clash)
    assert all(0 < len(name.encode()) <= 255 and "/" not in name and name not in (".", "..") for name in path)
    assert path[0] != ".mountpoints"
    assert key_of(path) == (key, clash)


NAME = st.one_of(
    st.builds(str.__add__, st.sampled_from(["%0", "%.", "%+", "%-", "%=", "%%", "%", ""]), COMPONENT),
    KEY.flatmap(lambda key: st.sampled_from(path_of(key, False) + path_of(key, True))),
)


@given(
    st.lists(
        NAME.filter(lambda n: n not in ("", ".", "..") and len(n.encode()) <= 255), min_size=1, max_size=4
    )
)
@example(["%+" + "a" * 250, "%-" + "a" * 3])  # would be short enough for a plain name
@example(["%+" + "a" * 246, "%-" + "a" * 200])  # cut elsewhere than encode cuts
@example(["%+" + "a" * 248, "%-" + "é" * 100])
@example([".mountpoints"])
def test_every_path_that_leads_to_a_key_is_the_one_path_of_it(path):
    found = key_of(path)
    assert found is None or path_of(*found) == path


@given(KEY, KEY, st.booleans(), st.booleans())
def test_two_keys_never_share_a_path(one, other, clash, other_clash):
    if (one, clash) != (other, other_clash):
        assert path_of(one, clash) != path_of(other, other_clash)


@pytest.mark.parametrize(
    ("component", "name"),
    [
        ("", "%0"),
        (".", "%."),
        ("..", "%.."),
        ("%0", "%%0"),
        ("%%", "%%%"),
        ("%", "%"),
        ("%a", "%a"),
        ("100%", "100%"),
    ],
)
def test_the_forms(component, name):
    assert names.encode(component) == (name,)


def test_a_long_component_is_cut_at_characters():
    assert names.encode("é" * 200) == ("%+" + "é" * 125, "%-" + "é" * 75)
    assert [len(n.encode()) for n in names.encode("\U0001f600" * 100)] == [250, 154]
    assert names.encode_clash("a" * 254) == ("%+" + "a" * 250, "%=" + "a" * 4)
    assert names.encode(".mountpoints", top=True) == ("%.mountpoints",)
