"""The errno boundary, and attributes as the kernel wants them."""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, ParamSpec, TypeVar

import pyfuse3
from pyfuse3 import EntryAttributes, FUSEError, RequestContext, SetattrFields

from kvcsfs.config import Permissions
from kvcsfs.engine.entry import charge
from kvcsfs.engine.namespace import Attributes
from kvcsfs.errors import KvcsError
from kvcsfs.fuse.inodes import File, Link, Node

log = logging.getLogger(__name__)

# What the kernel may remember, in seconds. Nothing changes behind its back but by another value of a key, or none,
# and then it is told (coherence.py).
TIMEOUT = 300.0
# What programs take as the size of their buffers: the most that one request carries.
IO_BYTES = 1 << 20

P = ParamSpec("P")
R = TypeVar("R")


def posix_errors(handler: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Turn any failure of a handler into one errno.

    pyfuse3 accepts FUSEError alone: any other exception leaves its main loop and takes the mount down, so this
    boundary is total.
    """

    @functools.wraps(handler)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await handler(*args, **kwargs)
        except FUSEError:
            raise
        except KvcsError as exc:
            log.debug("%s: %s", handler.__name__, exc)
            raise FUSEError(exc.errno) from exc
        except Exception as exc:
            log.exception("%s failed", handler.__name__)
            raise FUSEError(errno.EIO) from exc

    return call


class Usual:
    """What a file or directory has as long as nobody set it: owner, group and mode of its prefix, the daemon's start.

    What the configuration leaves open is the daemon's own owner and group, and mode 0755.
    """

    def __init__(self, permissions: Iterable[Permissions] = ()) -> None:
        self.started_ns = time.time_ns()
        given = {p.prefix: p for p in permissions}
        whole = _over(given.pop("", Permissions()), Permissions("", os.geteuid(), os.getegid(), 0o755))
        self._whole = whole
        self._prefixes = {prefix: _over(p, whole) for prefix, p in given.items()}

    def of(self, path: str) -> Permissions:
        """Owner, group and directory mode that are usual at a key or a directory."""
        return self._prefixes.get(path.partition("/")[0], self._whole) if self._prefixes else self._whole

    def unusual(self, path: str, parent: EntryAttributes, mode: int, ctx: RequestContext) -> Attributes:
        """What must be recorded of a new file, or of a directory (its path ends with "/"), that a process makes.

        A directory with the set-group-ID bit gives its group on, and to directories that bit. Source: inode(7).
        """
        usual, gid, mode = self.of(path), ctx.gid, stat.S_IMODE(mode)
        is_directory = path.endswith("/")
        if parent.st_mode & stat.S_ISGID:
            gid = parent.st_gid
            mode |= stat.S_ISGID if is_directory else 0
        found = {"mode": mode, "uid": ctx.uid, "gid": gid}
        same = {
            "mode": usual.mode if is_directory else file_mode(usual),
            "uid": usual.owner,
            "gid": usual.group,
        }
        return {name: value for name, value in found.items() if value != same[name]}

    def attributes(self, node: Node, recorded: Attributes) -> EntryAttributes:
        """The attributes of a node, of which `recorded` were set."""
        if isinstance(node, Link):
            return self._of_link(node)
        attr = EntryAttributes()
        attr.st_ino = pyfuse3.InodeT(node.number)
        attr.entry_timeout = attr.attr_timeout = TIMEOUT
        attr.st_blksize = IO_BYTES
        created = used = self.started_ns
        if isinstance(node, File):
            usual = self.of(node.key)
            kind, mode = stat.S_IFREG, file_mode(usual)
            if node.writer is not None:
                created = used = node.writer.mtime_ns
                if recorded.get("ctime_ns", 0) < created:  # times that were set before the last write
                    recorded = {k: v for k, v in recorded.items() if not k.endswith("time_ns")}
            elif node.entry is not None:
                created, used = int(node.entry.created * 1e9), int(node.entry.used * 1e9)
            attr.st_size = size = node.size
            attr.st_blocks = charge(size) // 512 if size else 0
            attr.st_nlink = 0 if node.gone else 1
        else:
            attr.st_nlink = 1  # as btrfs has: `find` must not conclude from it that there are no directories
            usual = self.of(node.path)
            kind, mode = stat.S_IFDIR, usual.mode
        uid, gid, modified, changed = usual.owner, usual.group, created, created
        if recorded:  # of most files nothing is
            uid, gid = recorded.get("uid", uid), recorded.get("gid", gid)
            mode = recorded.get("mode", mode)
            modified = recorded.get("mtime_ns", created)
            changed = max(recorded.get("ctime_ns", 0), created)
            used = recorded.get("atime_ns", used)
        attr.st_uid, attr.st_gid, attr.st_mode = uid, gid, pyfuse3.ModeT(kind | mode)
        attr.st_mtime_ns, attr.st_ctime_ns, attr.st_atime_ns = modified, changed, used
        return attr

    def _of_link(self, link: Link) -> EntryAttributes:
        attr = EntryAttributes()
        attr.st_ino = pyfuse3.InodeT(link.number)
        attr.entry_timeout = attr.attr_timeout = TIMEOUT
        attr.st_mode = pyfuse3.ModeT(stat.S_IFLNK | 0o777)
        attr.st_uid, attr.st_gid = self._whole.owner, self._whole.group
        attr.st_nlink, attr.st_size = 1, len(link.target)
        attr.st_mtime_ns = attr.st_ctime_ns = attr.st_atime_ns = self.started_ns
        return attr


def _over(given: Permissions, base: Permissions) -> Permissions:
    """Permissions in which what isn't given is that of `base`."""
    pairs = zip((given.owner, given.group, given.mode), (base.owner, base.group, base.mode), strict=True)
    return Permissions(given.prefix, *(mine if mine >= 0 else other for mine, other in pairs))


def file_mode(usual: Permissions) -> int:
    """The mode of files that follows from that of directories: without the bits to search and to inherit."""
    return usual.mode & 0o666


def changes(attr: EntryAttributes, fields: SetattrFields, now_ns: int) -> Attributes:
    """What a setattr request sets, but for the size."""
    found: Attributes = {}
    if fields.update_mode:
        found["mode"] = stat.S_IMODE(attr.st_mode)
    if fields.update_uid:
        found["uid"] = attr.st_uid
    if fields.update_gid:
        found["gid"] = attr.st_gid
    if fields.update_atime:
        found["atime_ns"] = attr.st_atime_ns
    if fields.update_mtime:
        found["mtime_ns"] = attr.st_mtime_ns
    if found:
        found["ctime_ns"] = now_ns
    return found
