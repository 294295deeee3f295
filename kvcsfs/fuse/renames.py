"""Renames: which ones there are, and what they do to names and nodes. Contents move through contents.py."""

from __future__ import annotations

import errno
from contextlib import AsyncExitStack

from pyfuse3 import RENAME_NOREPLACE, FUSEError

from kvcsfs.fuse.contents import Contents
from kvcsfs.fuse.inodes import HUB, Directory, File, Node
from kvcsfs.fuse.tree import Tree


class Renames:
    """Renames on one mount. The kernel keeps lookups and other changes out of both directories meanwhile."""

    def __init__(self, tree: Tree, contents: Contents) -> None:
        self._tree = tree
        self._contents = contents

    async def rename(
        self, old_parent: Directory, old_name: bytes, parent: Directory, name: bytes, flags: int
    ) -> None:
        """Rename a file, or a directory that has nothing in it. EXDEV, which makes `mv` copy, for what can't be."""
        if flags & ~RENAME_NOREPLACE:
            raise FUSEError(errno.EINVAL)
        node = await self._tree.lookup(old_parent, old_name)
        target = await self._tree.lookup(parent, name)
        if node is None:
            raise FUSEError(errno.ENOENT)
        if target is not None and flags & RENAME_NOREPLACE:
            raise FUSEError(errno.EEXIST)
        if old_parent.index != parent.index:
            raise FUSEError(errno.EXDEV)
        if node is target:
            return
        if isinstance(node, Directory):
            await self._directory(node, target, parent, name)
        elif isinstance(node, File):
            await self._file(node, target, parent, name)
        else:
            raise FUSEError(errno.EPERM)
        self._tree.changed(old_parent)
        self._tree.changed(parent)

    async def _directory(self, node: Directory, target: Node | None, parent: Directory, name: bytes) -> None:
        if target is not None and not isinstance(target, Directory):
            raise FUSEError(errno.ENOTDIR)
        if target is not None and not await self._tree.is_empty(target):
            raise FUSEError(errno.ENOTEMPTY)
        if node.partial or node.index == HUB or not node.path or not await self._tree.is_empty(node):
            raise FUSEError(errno.EXDEV)
        path = target.path if target is not None else self._tree.path_of_new(parent, name, "/")
        self._tree.namespace(node.index).move_directory(node.path, path)
        self._tree.engine.save_soon(node.index)
        self._tree.inodes.move(node, path, parent, name)

    async def _file(self, node: File, target: Node | None, parent: Directory, name: bytes) -> None:
        if isinstance(target, Directory):
            raise FUSEError(errno.EISDIR)
        other = target if isinstance(target, File) else None
        key = other.key if other is not None else self._tree.path_of_new(parent, name)
        async with AsyncExitStack() as locks:
            await locks.enter_async_context(node.lock)
            if other is not None:
                await locks.enter_async_context(other.lock)
            # Since it was looked up it may have lost its name; ESTALE makes the kernel do that again.
            if not self._tree.inodes.has(node):
                raise FUSEError(errno.ESTALE)
            await self._contents.rename(node, key, other)
            self._tree.inodes.move(node, key, parent, name)
        if other is not None:
            self._tree.inodes.drop_unused(other)
