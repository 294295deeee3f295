"""Tree: from names to nodes and back. What the directories of the mount hold, over index and namespace."""

from __future__ import annotations

import errno
import heapq
import itertools
import time
from collections.abc import Iterator

import trio
from pyfuse3 import FUSEError

from kvcsfs.engine import keys
from kvcsfs.engine.engine import Engine
from kvcsfs.engine.entry import Entry
from kvcsfs.engine.namespace import Attributes, Namespace
from kvcsfs.fuse import names
from kvcsfs.fuse.handles import DirectoryHandle
from kvcsfs.fuse.inodes import HUB, Directory, File, Inodes, Node
from kvcsfs.fuse.names import Kind, Name

PAGE = 256  # names fetched at once: below a millisecond of the loop
PATIENCE_SECONDS = 1.0  # for whoever has a file's lock, which may wait for a broken disk
LOOK = 64  # names looked up at once for a reply, of which the last are looked up in vain


class Tree:
    """The directories of one mount."""

    def __init__(self, engine: Engine, inodes: Inodes) -> None:
        self.engine = engine
        self.inodes = inodes
        self._namespaces: dict[int, Namespace] = {}
        self._nothing = Namespace({})
        pooled = engine.config.backend == "pooled"
        self._mountpoints = len(engine.volumes) if pooled else 1

    # -- records beside the keys

    def namespace(self, index: int) -> Namespace:
        """The namespace of a mountpoint, to be changed. Raises BusyError, BackingError while there is none."""
        found = self.peek(index)
        if found is self._nothing:
            self.engine.check_ready(index)
            raise AssertionError("a mountpoint that is ready has a namespace")
        return found

    def peek(self, index: int) -> Namespace:
        """The namespace of a mountpoint, to look: nothing is in it while recovery runs, or the directory is gone."""
        found = self._namespaces.get(index)
        if found is None:
            extras = self.engine.extras(index) if index != HUB else None
            if extras is None:
                return self._nothing
            found = self._namespaces[index] = Namespace(extras.setdefault("namespace", {}))
        return found

    def forget(self, index: int) -> None:
        """Have the namespace of a mountpoint anew from the engine."""
        self._namespaces.pop(index, None)

    def recorded(self, node: Node) -> Attributes:
        """What was set on a node."""
        if isinstance(node, File):
            return node.kept if node.gone else self.peek(node.index).attributes(node.key)
        return self.peek(node.index).directory_attributes(node.path) if isinstance(node, Directory) else {}

    # -- names

    def decode(self, parent: Directory, raw: bytes) -> Name | None:
        """What a name in a directory stands for; None for a form of the escape that stands for nothing."""
        if len(raw) > names.MAX_NAME_BYTES:
            raise FUSEError(errno.ENAMETOOLONG)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise FUSEError(errno.EILSEQ) from None
        return names.decode(text, parent.partial, self._is_top(parent))

    def _is_top(self, parent: Directory) -> bool:
        return parent.index == 0 and not parent.path

    async def lookup(self, parent: Directory, raw: bytes) -> Node | None:
        """The node of a name in a directory."""
        if parent.index == HUB:
            return self._mountpoint(parent, raw)
        name = self.decode(parent, raw)
        path = parent.base + name.component if name is not None else ""
        patience = trio.CancelScope()
        while True:
            ((entry, is_directory),) = await self.look(parent.index, [path])
            node = self.inodes.files.get((parent.index, path))
            if (
                node is None
                or not node.lock.locked()
                or not self.is_stale(node, entry)
                or patience.cancelled_caught
            ):
                return self._node(parent, raw, name, path, entry, is_directory)
            # To be told for sure: the kernel asks once more after ESTALE, and must get what can be opened.
            # Not for ever: the kernel asks nothing else of the directory meanwhile.
            with trio.move_on_after(PATIENCE_SECONDS) as patience:
                await self.recheck(node)

    def _node(
        self,
        parent: Directory,
        raw: bytes,
        name: Name | None,
        path: str,
        entry: Entry | None,
        is_directory: bool,
    ) -> Node | None:
        if name is None:
            is_hub = parent is self.inodes.root and raw == names.MOUNTPOINTS.encode()
            return self.inodes.directory(HUB, "", parent, raw) if is_hub else None
        if name.kind is Kind.CHUNK:
            return self.inodes.directory(parent.index, path, parent, raw)
        if is_directory == (name.kind is Kind.CLASH):
            return self._file(parent, raw, path, entry)
        return self.inodes.directory(parent.index, path + "/", parent, raw) if is_directory else None

    def path_of_new(self, parent: Directory, raw: bytes, suffix: str = "") -> str:
        """The key, or with "/" the directory, that a name which isn't there yet stands for."""
        name = self.decode(parent, raw)
        if parent.index == HUB:
            raise FUSEError(errno.EPERM)
        if name is None or name.kind is not Kind.NAME:
            raise FUSEError(errno.EINVAL)
        path = parent.base + name.component + suffix
        keys.check(path)
        return path

    def changed(self, directory: Directory) -> None:
        """A name in a directory came or went."""
        self.namespace(directory.index).changed(directory.base, time.time_ns())

    def _mountpoint(self, hub: Directory, raw: bytes) -> Node | None:
        if raw == b"0":
            return self.inodes.link
        if raw in {b"%d" % i for i in range(1, self._mountpoints)}:
            return self.inodes.directory(int(raw), "", hub, raw)
        return None

    async def look(self, index: int, paths: list[str]) -> list[tuple[Entry | None, bool]]:
        """The entries of keys, and whether directories are there that have their names."""
        looked = await self.engine.look_many(index, paths)
        namespace = self.peek(index)
        return [
            (entry, is_directory or namespace.is_directory(path + "/"))
            for path, (entry, is_directory) in zip(paths, looked, strict=True)
        ]

    async def file(self, parent: Directory, raw: bytes, key: str) -> File | None:
        """The node of a key, if there is a file."""
        return self._file(parent, raw, key, await self.engine.find(parent.index, key))

    def _file(self, parent: Directory, raw: bytes, key: str, entry: Entry | None) -> File | None:
        node = self.inodes.files.get((parent.index, key))
        if node is not None and not node.lock.locked() and self.is_stale(node, entry):
            self.inodes.lose(node, self.recorded(node))
            self.inodes.drop_unused(node)
            node = None
        if node is None:
            if entry is None and not self.peek(parent.index).is_file(key):
                return None
            node = self.inodes.file(parent.index, key, entry)
        node.parent, node.name = parent, raw
        return node

    def is_stale(self, node: File, entry: Entry | None) -> bool:
        """Whether a file isn't any more what its key holds: `entry`. While somebody has its lock that can't be told."""
        if node.gone or node.writer is not None:
            return node.gone
        return entry is not node.entry or (entry is None and not self.peek(node.index).is_file(node.key))

    async def recheck(self, node: File) -> None:
        """Take the name from a file that isn't any more what its key holds, once nobody has its lock."""
        try:
            async with node.lock:
                entry = await self.engine.find(node.index, node.key)
                if self.inodes.has(node) and self.is_stale(node, entry):
                    self.inodes.lose(node, self.recorded(node))
        finally:
            self.inodes.drop_unused(node)  # who had the lock could not, as we waited for it

    async def is_empty(self, node: Directory) -> bool:
        """Whether a directory has nothing in it."""
        handle = DirectoryHandle(node)
        while not handle.names and not handle.complete:
            await self.more(handle)
        return not handle.names

    # -- listing

    async def more(self, handle: DirectoryHandle) -> None:
        """Fetch the next page of names of an open directory."""
        node = handle.node
        if node.index == HUB:
            handle.names = [b"%d" % i for i in range(self._mountpoints)]
            handle.complete = True
            return
        found = await self._page(node, handle.last, PAGE)
        handle.complete = len(found) < PAGE
        if found:
            handle.last = found[-1]
        if node is self.inodes.root and not handle.names and self._mountpoints > 1:
            handle.names.append(names.MOUNTPOINTS.encode())
        components = [component.removesuffix("/") for component in found]
        looked = await self.look(node.index, [node.base + component for component in components])
        for name, component, (_, is_directory) in zip(found, components, looked, strict=True):
            if shown := self._shown(handle, component, is_directory and name == component):
                handle.names.append(shown.encode())

    async def listed(self, handle: DirectoryHandle, position: int) -> Iterator[tuple[bytes, Node | None]]:
        """Some of the names that were fetched, from a position on, with what they stand for now.

        Each node is made when the iterator comes to it: it must do that before the next await.
        """
        parent = handle.node
        raws = handle.names[position : position + LOOK]
        if parent.index == HUB:
            return ((raw, self._mountpoint(parent, raw)) for raw in raws)
        base = parent.base
        decoded = [self.decode(parent, raw) for raw in raws]
        paths = [base + name.component if name is not None else "" for name in decoded]
        looked = await self.look(parent.index, paths)
        return (
            (raw, self._node(parent, raw, name, path, entry, is_directory))
            for raw, name, path, (entry, is_directory) in zip(raws, decoded, paths, looked, strict=True)
        )

    async def _page(self, node: Directory, after: str | None, limit: int) -> list[str]:
        """Components that follow `after`, those of directories with a slash behind them."""
        base, partial = node.base, node.partial
        start = after if after is not None else partial or None
        found = await self.engine.children(node.index, base, start, limit)
        of_records = list(itertools.islice(self.peek(node.index).children(base, start), limit))
        if of_records:
            found = [n for n, _ in itertools.groupby(heapq.merge(found, of_records))][:limit]
        return list(itertools.takewhile(lambda n: n.startswith(partial), found)) if partial else found

    def _shown(self, handle: DirectoryHandle, component: str, clash: bool) -> str | None:
        """The name that stands for a component in a directory; one for all that lie deeper below it."""
        node = handle.node
        encoded = names.encode_clash(component) if clash else names.encode(component, self._is_top(node))
        if len(encoded) == 1 and not node.partial:
            return encoded[0]
        depth = len(names.chunks(node.partial)) if node.partial else 0
        if depth >= len(encoded) or "".join(name[2:] for name in encoded[:depth]) != node.partial:
            return None
        if len(encoded) - 1 > depth:
            if encoded[depth] in handle.chunks:
                return None
            handle.chunks.add(encoded[depth])
        return encoded[depth]

    def check(self) -> None:
        """Assert the invariants of the namespaces."""
        for namespace in self._namespaces.values():
            namespace.check()
