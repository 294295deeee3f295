"""Handles: open files and directories by the number that the kernel gives back."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Generic, TypeVar

from kvcsfs.fuse.inodes import Directory, File


@dataclasses.dataclass(slots=True, eq=False)
class FileHandle:
    """An open file. `flushed`: a descriptor of it was closed, and nothing was written since."""

    node: File
    writable: bool
    flushed: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class DirectoryHandle:
    """An open directory: the raw names listed so far, in order; a position in them is what the kernel resumes at.

    Names are never listed anew, so none comes twice; `last` is where the next page begins, so none is lost.
    `chunks` are the beginnings of long components that were listed.
    """

    node: Directory
    names: list[bytes] = dataclasses.field(default_factory=list)
    last: str | None = None
    complete: bool = False
    chunks: set[str] = dataclasses.field(default_factory=set)

    def rewind(self) -> None:
        """Begin anew."""
        self.names, self.last, self.complete, self.chunks = [], None, False, set()


H = TypeVar("H")


class Handles(Generic[H]):
    """Open handles by number. A number is never given twice."""

    def __init__(self) -> None:
        self._next = itertools.count(1)
        self._open: dict[int, H] = {}

    def add(self, handle: H) -> int:
        """Keep a handle, and return its number."""
        number = next(self._next)
        self._open[number] = handle
        return number

    def __getitem__(self, number: int) -> H:
        return self._open[number]

    def pop(self, number: int) -> H:
        """Give a handle up."""
        return self._open.pop(number)
