"""The errno boundary, and attributes as the kernel wants them."""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import pyfuse3
from pyfuse3 import EntryAttributes, FUSEError, RequestContext, SetattrFields

from kvcsfs.engine.entry import charge
from kvcsfs.engine.namespace import Attributes
from kvcsfs.errors import KvcsError
from kvcsfs.fuse.inodes import File, Link, Node

log = logging.getLogger(__name__)

# What the kernel may remember, in seconds. Nothing changes behind its back but by another value of a key, or none,
# and then it is told (coherence.py).
TIMEOUT = 300.0
FILE_MODE, DIRECTORY_MODE = 0o644, 0o755
# What programs take as the size of their buffers; one request of the kernel's read-ahead.
IO_BYTES = 128 << 10

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
    """What a file or directory has as long as nobody set it: the daemon's owner, the usual modes, its start."""

    def __init__(self) -> None:
        self.uid, self.gid = os.geteuid(), os.getegid()
        self.started_ns = time.time_ns()

    def unusual(self, mode: int, ctx: RequestContext, usual_mode: int) -> Attributes:
        """What must be recorded of something new, made by the process of a request."""
        found = {"mode": stat.S_IMODE(mode), "uid": ctx.uid, "gid": ctx.gid}
        usual = {"mode": usual_mode, "uid": self.uid, "gid": self.gid}
        return {name: value for name, value in found.items() if value != usual[name]}

    def attributes(self, node: Node, recorded: Attributes) -> EntryAttributes:
        """The attributes of a node, of which `recorded` were set."""
        attr = EntryAttributes()
        attr.st_ino = pyfuse3.InodeT(node.number)
        attr.entry_timeout = attr.attr_timeout = TIMEOUT
        attr.st_uid, attr.st_gid = recorded.get("uid", self.uid), recorded.get("gid", self.gid)
        attr.st_blksize = IO_BYTES
        # One link for a directory, as btrfs has: `find` must not conclude from the number that it has no directories.
        attr.st_nlink = 0 if isinstance(node, File) and node.gone else 1
        if isinstance(node, File):
            mode, usual = stat.S_IFREG, FILE_MODE
            created = used = self.started_ns
            if node.writer is not None:
                created = used = node.writer.mtime_ns
                if recorded.get("ctime_ns", 0) < created:  # times that were set before the last write
                    recorded = {k: v for k, v in recorded.items() if not k.endswith("time_ns")}
            elif node.entry is not None:
                created, used = int(node.entry.created * 1e9), int(node.entry.used * 1e9)
            attr.st_size = node.size
            attr.st_blocks = charge(node.size) // 512 if node.size else 0
        else:
            mode, usual = (stat.S_IFLNK, 0o777) if isinstance(node, Link) else (stat.S_IFDIR, DIRECTORY_MODE)
            created = used = self.started_ns
            attr.st_size = len(node.target) if isinstance(node, Link) else 0
        attr.st_mode = pyfuse3.ModeT(mode | recorded.get("mode", usual))
        attr.st_mtime_ns = recorded.get("mtime_ns", created)
        attr.st_ctime_ns = max(recorded.get("ctime_ns", 0), created)
        attr.st_atime_ns = recorded.get("atime_ns", used)
        return attr


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
