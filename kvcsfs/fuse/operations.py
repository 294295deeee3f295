"""Operations: what the kernel asks of the mount, one short method each. It translates; tree and contents decide."""

# ruff: noqa: ARG002  the signatures are those of pyfuse3.Operations

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterable, Sequence

import pyfuse3
from pyfuse3 import (
    EntryAttributes,
    FileHandleT,
    FileInfo,
    FileNameT,
    FlagT,
    FUSEError,
    InodeT,
    ModeT,
    ReaddirToken,
    RequestContext,
    SetattrFields,
    StatvfsData,
    XAttrNameT,
)

from kvcsfs.config import Permissions
from kvcsfs.engine.entry import BLOCK
from kvcsfs.fuse import names, xattrs
from kvcsfs.fuse.contents import Contents
from kvcsfs.fuse.handles import DirectoryHandle, FileHandle, Handles
from kvcsfs.fuse.inodes import HUB, Directory, File, Link, Node
from kvcsfs.fuse.permits import Permits
from kvcsfs.fuse.posix import Usual, changes, posix_errors
from kvcsfs.fuse.renames import Renames
from kvcsfs.fuse.tree import Tree

log = logging.getLogger(__name__)


class Operations(pyfuse3.Operations):
    """The handlers of one mount.

    Left out, so that the kernel stops asking after the first ENOSYS: access (default_permissions decides) and, unless
    `with_xattrs`, extended attributes: with getxattr answered, `ls -l` asks for each file, and every write through a
    descriptor that also reads asks for security.capability first.
    """

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(
        self,
        tree: Tree,
        contents: Contents,
        permissions: Iterable[Permissions] = (),
        with_xattrs: bool = False,
    ) -> None:
        super().__init__()
        self._tree = tree
        self._inodes = tree.inodes
        self._contents = contents
        self._renames = Renames(tree, contents)
        self._usual = Usual(permissions)
        self._permits = Permits(tree.engine.access)
        self._with_xattrs = with_xattrs
        self._files: Handles[FileHandle] = Handles()
        self._directories: Handles[DirectoryHandle] = Handles()

    # -- nodes and names

    def _node(self, number: int) -> Node:
        node = self._inodes.get(number)
        if node is None:
            raise FUSEError(errno.ESTALE)
        return node

    def _directory(self, number: int) -> Directory:
        node = self._node(number)
        if not isinstance(node, Directory):
            raise FUSEError(errno.ENOTDIR)
        return node

    def _file(self, number: int) -> File:
        node = self._node(number)
        if isinstance(node, Directory):
            raise FUSEError(errno.EISDIR)
        if isinstance(node, Link):
            raise FUSEError(errno.ELOOP)
        return node

    def _need(self, ctx: RequestContext, node: Node, *, write: bool) -> None:
        if isinstance(node, File):
            self._permits.need(ctx, node.index, node.key, write=write)
        elif isinstance(node, Directory) and node.index != HUB:
            self._permits.need(ctx, node.index, node.path, write=write)

    def _attributes(self, node: Node) -> EntryAttributes:
        return self._usual.attributes(node, self._tree.recorded(node))

    def _found(self, node: Node) -> EntryAttributes:
        """The attributes of a node that the kernel now counts once more."""
        node.lookups += 1
        return self._attributes(node)

    @posix_errors
    async def lookup(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> EntryAttributes:
        """Find a name. A miss isn't cached: another process may put the key at any time."""
        node = await self._tree.lookup(self._directory(parent_inode), name)
        if node is None:
            raise FUSEError(errno.ENOENT)
        return self._found(node)

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        """The kernel drops inodes. Nobody hears of an error here, so none may leave."""
        try:
            self._inodes.forget(inode_list)
        except Exception:
            log.exception("forget failed")

    # -- attributes

    @posix_errors
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        """Attributes; those of a content that is still open although its key has another one, too."""
        node = self._node(inode)
        if isinstance(node, File) and not node.opens and not node.lock.locked():
            entry = await self._tree.engine.find(node.index, node.key)
            if self._tree.is_stale(node, entry):
                raise FUSEError(errno.ESTALE)
        return self._attributes(node)

    @posix_errors
    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        """Set the size, or what the namespace records: owner, mode, times."""
        node = self._node(inode)
        self._need(ctx, node, write=True)
        # By a path, as far as that can be told: fchmod and the like come without their handle.
        if isinstance(node, File) and fh is None and (fields.update_size or not node.opens):
            await self._need_current(node)
        if fields.update_size:
            await self._contents.truncate(self._file(inode), attr.st_size, by_path=fh is None)
        else:  # the times that come with a size are those of its writer
            self._record(node, changes(attr, fields, time.time_ns()))
        return self._attributes(node)

    def _record(self, node: Node, changed: dict[str, int]) -> None:
        if not changed:
            return
        if isinstance(node, File):
            if node.gone:
                node.kept = {**node.kept, **changed}
            else:
                self._tree.namespace(node.index).set_file(node.key, changed)
        elif isinstance(node, Directory) and not node.partial and node.index != HUB:
            self._tree.namespace(node.index).set_directory(node.path, changed)
        else:
            raise FUSEError(errno.EPERM)
        if not all(name.endswith("time_ns") for name in changed):  # llm-d notes each hit as an access time
            self._tree.engine.save_soon(node.index)

    @posix_errors
    async def readlink(self, inode: InodeT, ctx: RequestContext) -> FileNameT:
        """The target of the one symbolic link."""
        node = self._node(inode)
        if not isinstance(node, Link):
            raise FUSEError(errno.EINVAL)
        return FileNameT(node.target)

    @posix_errors
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        """Room and use of all mountpoints together."""
        spaces = [await self._tree.engine.space(i) for i in range(len(self._tree.engine.volumes))]
        capacity, free, entries = (sum(column) for column in zip(*spaces, strict=True))
        stat = StatvfsData()
        stat.f_bsize = stat.f_frsize = BLOCK
        stat.f_blocks = capacity // BLOCK
        stat.f_bfree = stat.f_bavail = free // BLOCK
        stat.f_ffree = stat.f_favail = stat.f_bfree // 2  # the smallest value takes two blocks
        stat.f_files = entries + stat.f_ffree
        stat.f_namemax = names.MAX_NAME_BYTES
        return stat

    # -- directories

    @posix_errors
    async def mkdir(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, ctx: RequestContext
    ) -> EntryAttributes:
        """Make a directory that stays without keys in it."""
        parent = self._directory(parent_inode)
        if await self._tree.lookup(parent, name) is not None:
            raise FUSEError(errno.EEXIST)
        path = self._tree.path_of_new(parent, name, "/")
        self._permits.need(ctx, parent.index, path, write=True)
        now = time.time_ns()
        recorded = {
            **self._usual.unusual(path, self._attributes(parent), mode, ctx),
            "mtime_ns": now,
            "ctime_ns": now,
            "atime_ns": now,
        }
        self._tree.namespace(parent.index).make(path, recorded)
        self._tree.engine.save_soon(parent.index)
        self._tree.changed(parent)
        return self._found(self._inodes.directory(parent.index, path, parent, name))

    @posix_errors
    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        """Remove a directory in which nothing is. One that eviction emptied and took before us is fine."""
        parent = self._directory(parent_inode)
        node = await self._tree.lookup(parent, name)
        if isinstance(node, File | Link):
            raise FUSEError(errno.ENOTDIR)
        if node is None:
            return
        if node.index == HUB or not node.path:
            raise FUSEError(errno.EBUSY)
        self._need(ctx, node, write=True)
        if not await self._tree.is_empty(node):
            raise FUSEError(errno.ENOTEMPTY)
        self._tree.namespace(parent.index).remove_directory(node.path)
        self._tree.engine.save_soon(parent.index)
        self._tree.changed(parent)

    @posix_errors
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        """Open a directory for listing."""
        return FileHandleT(self._directories.add(DirectoryHandle(self._directory(inode))))

    @posix_errors
    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        """List names with attributes from a position on, until the kernel's buffer is full."""
        handle = self._directories[fh]
        if start_id == 0:
            handle.rewind()
        position = start_id
        while position < len(handle.names) or not handle.complete:
            if position >= len(handle.names):
                await self._tree.more(handle)
            for raw, node in await self._tree.listed(handle, position):
                position += 1
                if node is None:  # it went since its name was read
                    continue
                if not pyfuse3.readdir_reply(token, FileNameT(raw), self._attributes(node), position):
                    self._inodes.drop_unused(node)
                    return
                node.lookups += 1

    @posix_errors
    async def releasedir(self, fh: FileHandleT) -> None:
        """Close a directory."""
        self._directories.pop(fh)

    @posix_errors
    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        """Nothing to do: names are in the footers of values, and the rest in the snapshot."""

    # -- files

    @posix_errors
    async def create(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        """Open a file for writing, made if need be."""
        parent = self._directory(parent_inode)
        node = await self._tree.lookup(parent, name)
        if node is not None:
            if flags & os.O_EXCL:
                raise FUSEError(errno.EEXIST)
            file = self._file(node.number)
            self._need_for(ctx, file, flags)
            info = await self._opened(file, flags)
            return info, self._found(file)
        key = self._tree.path_of_new(parent, name)
        self._permits.need(ctx, parent.index, key, write=True)
        recorded = self._usual.unusual(key, self._attributes(parent), mode, ctx)
        self._tree.namespace(parent.index).create(key, recorded)
        file = await self._made(parent, name, key)
        self._tree.changed(parent)
        # Truncating is what gives it a writer, and so a commit at its last release.
        return await self._opened(file, flags | os.O_TRUNC), self._found(file)

    async def _made(self, parent: Directory, name: bytes, key: str) -> File:
        file = await self._tree.file(parent, name, key)
        if file is None:
            raise FUSEError(errno.ESTALE)
        return file

    @posix_errors
    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        """Open a file; O_TRUNC comes here, O_DIRECT and the like stay with the kernel."""
        file = self._file(inode)
        self._need_for(ctx, file, flags)
        await self._need_current(file)
        return await self._opened(file, flags)

    async def _need_current(self, file: File) -> None:
        """Raise ESTALE, which makes the kernel look the path up again, if its key has another content now."""
        if not file.lock.locked():
            entry = await self._tree.engine.find(file.index, file.key)
            if self._tree.is_stale(file, entry):
                raise FUSEError(errno.ESTALE)

    def _need_for(self, ctx: RequestContext, file: File, flags: int) -> None:
        if flags & os.O_ACCMODE != os.O_WRONLY:
            self._need(ctx, file, write=False)
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            self._need(ctx, file, write=True)

    async def _opened(self, file: File, flags: int) -> FileInfo:
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        handle = await self._contents.open(file, writable, bool(flags & os.O_TRUNC))
        # One inode, one content: pages that the kernel has of it are right. What only writes can't be mapped, and
        # past the kernel's cache it writes faster, takes memory once, and asks for no security.capability.
        return FileInfo(
            fh=FileHandleT(self._files.add(handle)),
            keep_cache=True,
            direct_io=flags & os.O_ACCMODE == os.O_WRONLY,
        )

    @posix_errors
    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        """Read."""
        data = await self._contents.read(self._files[fh].node, off, size)
        return data  # type: ignore[return-value]  # pyfuse3 is annotated with bytes, and takes any buffer

    @posix_errors
    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        """Write all of it."""
        return await self._contents.write(self._files[fh], off, buf)

    @posix_errors
    async def flush(self, fh: FileHandleT) -> None:
        """A descriptor was closed, one of perhaps several: no commit."""
        self._contents.flushed(self._files[fh])

    @posix_errors
    async def release(self, fh: FileHandleT) -> None:
        """The last descriptor of a handle was closed."""
        await self._contents.release(self._files.pop(fh))

    @posix_errors
    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        """Make what was written so far a value."""
        await self._contents.sync(self._files[fh].node)

    @posix_errors
    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        """Remove a file. Whoever has it open keeps its content."""
        parent = self._directory(parent_inode)
        node = await self._tree.lookup(parent, name)
        if node is None:
            raise FUSEError(errno.ENOENT)
        file = self._file(node.number)
        self._need(ctx, file, write=True)
        async with file.lock:
            await self._contents.remove(file)
        self._tree.changed(parent)
        self._inodes.drop_unused(file)

    @posix_errors
    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: FileNameT,
        parent_inode_new: InodeT,
        name_new: FileNameT,
        flags: FlagT,
        ctx: RequestContext,
    ) -> None:
        """Rename a file, replacing another; or a directory that has nothing in it."""
        old_parent, new_parent = self._directory(parent_inode_old), self._directory(parent_inode_new)
        if self._permits.restricted:
            await self._need_named(ctx, old_parent, name_old)
            await self._need_named(ctx, new_parent, name_new)
        await self._renames.rename(old_parent, name_old, new_parent, name_new, flags)

    async def _need_named(self, ctx: RequestContext, parent: Directory, name: bytes) -> None:
        """Raise EACCES unless the process may change what a name stands for, or what it would."""
        node = await self._tree.lookup(parent, name)
        if node is None:
            self._permits.need(ctx, parent.index, self._tree.path_of_new(parent, name), write=True)
            return
        try:
            self._need(ctx, node, write=True)
        finally:
            self._inodes.drop_unused(node)

    # -- extended attributes

    @posix_errors
    async def getxattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> bytes:
        """The value of one."""
        if not self._with_xattrs:
            raise FUSEError(errno.ENOSYS)
        return await xattrs.value(self._tree, self._node(inode), name)

    @posix_errors
    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[XAttrNameT]:
        """None is listed, so that no copy carries them along as if they were content."""
        if not self._with_xattrs:
            raise FUSEError(errno.ENOSYS)
        return []

    # -- what a store of values has not

    @posix_errors
    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        """No key is another's alias."""
        raise FUSEError(errno.EPERM)

    @posix_errors
    async def symlink(
        self, parent_inode: InodeT, name: FileNameT, target: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        """No links."""
        raise FUSEError(errno.EPERM)

    @posix_errors
    async def mknod(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        """No devices, pipes or sockets."""
        raise FUSEError(errno.EPERM)
