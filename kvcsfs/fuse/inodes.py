"""Inodes: what the kernel knows by number. Plain tables; no I/O.

A file's inode stands for one content: when a key gets another value from elsewhere, the path gets a new inode, so
that pages which the kernel cached, and descriptors that programs hold, keep belonging to the old one.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import pyfuse3

from kvcsfs.engine.entry import Entry
from kvcsfs.engine.namespace import Attributes
from kvcsfs.locks import Lock

if TYPE_CHECKING:
    from kvcsfs.fuse.handles import FileHandle
    from kvcsfs.fuse.writer import Writer

HUB = -1  # the index that stands for the directory of mountpoints


@dataclasses.dataclass(slots=True, eq=False)
class Directory:
    """A directory: "" or ending with a slash; or, without one, the beginning of a long component (names.py)."""

    number: int
    index: int
    path: str
    parent: Directory | None = None
    name: bytes = b""
    lookups: int = 0

    @property
    def partial(self) -> str:
        """The piece of a long component that this directory stands for, "" if it is a real one."""
        return self.path[self.path.rfind("/") + 1 :]

    @property
    def base(self) -> str:
        """The real directory, with its slash."""
        return self.path[: self.path.rfind("/") + 1]


@dataclasses.dataclass(slots=True, eq=False)
class Link:
    """The symbolic link `.mountpoints/0`: a second name for the root, as a directory can't have two."""

    number: int
    target: bytes = b".."
    lookups: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class File:
    """A file: a value (`entry`), or one being written (`writer`), or an empty one (neither).

    `lock` is held by every change of content or name. `lease` and `fd` hold the entry while handles are open. `gone`:
    it has lost its name; `kept` is then what was set on it.
    """

    number: int
    index: int
    key: str
    entry: Entry | None
    parent: Directory | None = None
    name: bytes = b""
    lookups: int = 0
    lock: Lock = dataclasses.field(default_factory=Lock)
    lease: int = 0
    fd: int = -1
    writer: Writer | None = None
    opens: int = 0
    writers: set[FileHandle] = dataclasses.field(default_factory=set)
    gone: bool = False
    kept: Attributes = dataclasses.field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of the content."""
        if self.writer is not None:
            return self.writer.size
        return self.entry.size if self.entry is not None else 0


Node = Directory | Link | File


class Inodes:
    """Nodes by number and by path.

    Invariant: a node is in `_numbers` from its making until the kernel and every handle have let it go, and a number
    is never given twice; a file is in `files` exactly while it is not gone and has a number.
    """

    def __init__(self) -> None:
        self._next = itertools.count(int(pyfuse3.ROOT_INODE))
        self._numbers: dict[int, Node] = {}
        self.files: dict[tuple[int, str], File] = {}
        self.directories: dict[tuple[int, str], Directory] = {}
        # Directory and name of what the kernel knows wrongly; coherence.py tells it, None ends that.
        self.outdated: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self.root = self.directory(0, "", None, b"")
        self.root.lookups = 1  # the kernel's own, never forgotten while mounted
        self.link = Link(next(self._next), lookups=1)
        self._numbers[self.link.number] = self.link

    def get(self, number: int) -> Node | None:
        """The node of a number."""
        return self._numbers.get(number)

    def directory(self, index: int, path: str, parent: Directory | None, name: bytes) -> Directory:
        """The node of a directory, made if need be."""
        node = self.directories.get((index, path))
        if node is None:
            node = Directory(next(self._next), index, path, parent, name)
            self.directories[index, path] = self._numbers[node.number] = node
        return node

    def file(self, index: int, key: str, entry: Entry | None) -> File:
        """A new node for a key that has none."""
        assert (index, key) not in self.files
        node = File(next(self._next), index, key, entry)
        self.files[index, key] = self._numbers[node.number] = node
        return node

    def has(self, node: File) -> bool:
        """Whether a file still has its name: it has not lost it, nor has it been dropped."""
        return self.files.get((node.index, node.key)) is node

    def move(self, node: File | Directory, path: str, parent: Directory, name: bytes) -> None:
        """Give a node another path; what has it so far loses it."""
        if isinstance(node, File):
            if other := self.files.get((node.index, path)):
                self.detach(other, {})
            del self.files[node.index, node.key]
            node.key = path
            self.files[node.index, path] = node
        else:
            del self.directories[node.index, node.path]
            node.path = path
            self.directories[node.index, path] = node
        node.parent, node.name = parent, name

    def lose(self, node: File, kept: Attributes) -> None:
        """A file has lost its name behind the kernel's back, which goes on answering for it until it is told."""
        self.outdate(node)
        self.detach(node, kept)

    def outdate(self, node: Directory | File) -> None:
        """What the kernel knows under the name of a node is wrong."""
        if node.parent is not None and node.lookups:
            self.outdated.put((node.parent.number, node.name))

    def detach(self, node: File, kept: Attributes) -> None:
        """A file has lost its name, if it still has it."""
        if self.has(node):
            node.gone, node.kept = True, kept
            del self.files[node.index, node.key]

    def forget(self, forgotten: Iterable[tuple[int, int]]) -> None:
        """The kernel gives lookups back: pairs of number and count."""
        for number, count in forgotten:
            node = self._numbers.get(number)
            if node is not None:
                node.lookups = max(node.lookups - count, 0)
                self.drop_unused(node)

    def drop_unused(self, node: Node) -> None:
        """Forget a node that neither the kernel nor a handle knows."""
        if node.lookups or isinstance(node, Link) or node.number not in self._numbers:
            return
        if isinstance(node, Directory):
            if self.directories.get((node.index, node.path)) is node:  # else another took its place
                del self.directories[node.index, node.path]
        elif node.opens or node.writer is not None or node.lock.locked():
            return
        elif not node.gone:
            del self.files[node.index, node.key]
        self._numbers.pop(node.number, None)

    def open_files(self) -> Iterator[File]:
        """Yield the files that handles hold or that have something to commit."""
        for node in list(self._numbers.values()):
            if isinstance(node, File) and (node.opens or node.writer is not None):
                yield node

    def check(self) -> None:
        """Assert the invariant."""
        for number, node in self._numbers.items():
            assert number == node.number
            if isinstance(node, File):
                assert self.has(node) != node.gone
                held = node.lookups or node.opens or node.writer is not None or node.lock.locked()
                assert held or not node.gone, f"nobody knows {node.key!r}"
        assert all(self._numbers.get(n.number) is n for n in self.files.values())
        assert all(self._numbers.get(n.number) is n for n in self.directories.values())
