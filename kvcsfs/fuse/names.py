"""Names: the reversible escape between the components of keys and the names in a directory. Pure.

Every name is as its component, but for those that a path can't hold. `%` and one of `0 . + - = %` begin a form:

    %0             the empty component
    %. %..         the components "." and ".."; `%.mountpoints` at the top, where `.mountpoints` is the store's own
    %+A/%+B/%-C    a component over 255 bytes, in nested directories of at most 250 bytes each
    %=A            the key A where A is a directory, too (the directory has the plain name); a long one ends in %=C
    %%...          a component that itself starts with a form
"""

from __future__ import annotations

import enum
from typing import NamedTuple

MAX_NAME_BYTES = 255  # NAME_MAX
CHUNK_BYTES = 250
MOUNTPOINTS = ".mountpoints"
_FORMS = frozenset("0.+-=%")


class Kind(enum.Enum):
    """What a name stands for."""

    NAME = "a file or directory"
    CLASH = "a file whose plain name is a directory's"
    CHUNK = "the beginning of a long component"


class Name(NamedTuple):
    """A decoded name: the component, or with CHUNK what is known of it so far."""

    kind: Kind
    component: str


def encode(component: str, top: bool = False) -> tuple[str, ...]:
    """The name of a component; several, to be nested, for a long one. `top`: at the root of the mount."""
    plain = _escape(component, top)
    if len(plain.encode()) <= MAX_NAME_BYTES:
        return (plain,)
    *head, last = chunks(component)
    return (*("%+" + chunk for chunk in head), "%-" + last)


def encode_clash(component: str) -> tuple[str, ...]:
    """The name of a key whose component is a directory, too."""
    if len(component.encode()) <= MAX_NAME_BYTES - 2:
        return ("%=" + component,)
    *head, last = chunks(component)
    return (*("%+" + chunk for chunk in head), "%=" + last)


def decode(name: str, partial: str = "", top: bool = False) -> Name | None:
    """What a name stands for, or None if it isn't one that `encode` gives.

    `partial` is what the directory holds of a long component, "" in others.
    """
    if name[:1] not in ("%", ".", "") and not partial:  # as most are: no form, and itself
        return Name(Kind.NAME, name) if len(name.encode()) <= MAX_NAME_BYTES else None
    form, component = name[:2], partial + name[2:]
    if form == "%+":
        full = len(name[2:].encode()) > CHUNK_BYTES - 4  # a character of 4 bytes didn't fit any more
        return Name(Kind.CHUNK, component) if full and chunks(component)[-1] == name[2:] else None
    if form == "%=":
        found, names = Name(Kind.CLASH, component), encode_clash(component)
    elif form == "%-":
        found, names = Name(Kind.NAME, component), encode(component, top)
    else:
        found = Name(Kind.NAME, _unescape(name))
        names = encode(found.component, top)
    nested = bool(partial)
    return found if names[-1] == name and (len(names) > 1) == nested else None


def chunks(component: str) -> list[str]:
    """Cut at characters, each piece as long as fits into CHUNK_BYTES; so a longer text is cut at the same places."""
    pieces: list[str] = []
    start = size = 0
    for i, character in enumerate(component):
        width = len(character.encode())
        if size + width > CHUNK_BYTES:
            pieces.append(component[start:i])
            start, size = i, 0
        size += width
    return [*pieces, component[start:]]


def _escape(component: str, top: bool) -> str:
    if not component:
        return "%0"
    special = component in (".", "..") or (top and component == MOUNTPOINTS)
    return "%" + component if special or (component[0] == "%" and component[1:2] in _FORMS) else component


def _unescape(name: str) -> str:
    if name == "%0":
        return ""
    return name[1:] if name[:2] in ("%.", "%%") else name
