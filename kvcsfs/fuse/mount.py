"""Mount: brings the POSIX face up at a directory and takes it down again."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
from pathlib import Path

import pyfuse3
import trio

from kvcsfs.engine.engine import Engine
from kvcsfs.errors import ConfigError
from kvcsfs.fuse.coherence import Coherence
from kvcsfs.fuse.contents import Contents
from kvcsfs.fuse.inodes import Inodes
from kvcsfs.fuse.operations import Operations
from kvcsfs.fuse.tree import Tree

log = logging.getLogger(__name__)

DEVICE = "/dev/fuse"
NAME = "kvcsfs"
TYPE = "fuse.kvcsfs"
ANSWER_SECONDS = 10.0
STOP_SECONDS = 5.0
READ_AHEAD_KIB = 4096  # measured: 476 -> 862 MB/s for a sequential read, against the kernel's 128
MNT_DETACH = 2
CAP_SYS_ADMIN = 21


class Mount:
    """The mount of a running engine. One a process: pyfuse3 has one session."""

    def __init__(self, engine: Engine, path: Path) -> None:
        self._engine = engine
        self._path = path
        inodes = Inodes()
        self._tree = Tree(engine, inodes)
        self._contents = Contents(engine, inodes, self._tree.namespace)
        self._coherence = Coherence(self._tree)
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._serving = True
        self._stopping = False

    async def start(self, nursery: trio.Nursery) -> None:
        """Mount, and return when the mount answers. Raises ConfigError; then nothing is mounted."""
        await trio.to_thread.run_sync(prepare, self._path, abandon_on_cancel=True)
        options = {f"fsname={NAME}", f"subtype={NAME}", "default_permissions"}
        if may_mount():
            options.add("allow_other")
        try:
            pyfuse3.init(Operations(self._tree, self._contents), str(self._path), options)
        except RuntimeError as exc:
            raise ConfigError(f"{self._path}: can't be mounted: {exc}") from exc
        self._engine.watchers.append(self._coherence.watch)
        nursery.start_soon(self._run)
        with trio.move_on_after(ANSWER_SECONDS):
            await trio.to_thread.run_sync(os.statvfs, self._path, abandon_on_cancel=True)
            tune(self._path)
            return
        await self.stop()
        raise ConfigError(f"{self._path}: mounted, but it doesn't answer")

    async def _run(self) -> None:
        """Serve until unmounted or cancelled, and leave nothing mounted either way."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._coherence.run)
                    await pyfuse3.main()
                    nursery.cancel_scope.cancel()
        except Exception:
            log.exception("the mount at %s failed", self._path)
        finally:
            self._serving = False
            if not self._stopping:
                log.warning("%s: the mount has ended", self._path)
            with trio.CancelScope(shield=True):
                await self._take_down()
            self._ended.set()

    async def stop(self) -> None:
        """Answer what was asked, commit what programs have closed, drop what they were writing, and unmount."""
        self._stopping = True
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._coherence.stop)  # while we still answer what it may wait for
            if self._serving:
                pyfuse3.terminate()
            with trio.move_on_after(STOP_SECONDS):
                await self._ended.wait()
            self._scope.cancel()
            await self._ended.wait()

    async def _take_down(self) -> None:
        self._engine.watchers.remove(self._coherence.watch)
        await self._contents.close()
        if await trio.to_thread.run_sync(self._coherence.stop):
            # Closes the connection first, so that programs waiting for us get an error, and then detaches.
            pyfuse3.close(unmount=True)
        else:  # a thread is still in a call of the session, which must not go
            unmount(self._path)

    def check(self) -> None:
        """Assert the invariants."""
        self._tree.inodes.check()
        self._tree.check()


def prepare(path: Path) -> None:
    """See that a directory can be mounted on: clear a dead mount of ours, make it if need be. Raises ConfigError."""
    try:
        os.close(os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as exc:
        raise ConfigError(f"{DEVICE}: {exc.strerror}; a mount needs it: load fuse, or serve without") from exc
    while (kind := mounted(path)) is not None:
        if not (kind == TYPE and is_dead(path)):
            raise ConfigError(f"{path}: busy mount point, {kind} is mounted there; expected a free directory")
        log.info("%s: clearing the mount of a daemon that died", path)
        unmount(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"{path}: can't be a mount point: {exc.strerror}") from exc


def may_mount() -> bool:
    """Whether mount(2) is ours to call: root, or a user whom CAP_SYS_ADMIN was given. Source: capabilities(7)."""
    effective = re.search(
        r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE
    )
    return effective is not None and bool(int(effective[1], 16) >> CAP_SYS_ADMIN & 1)


def mounted(path: Path) -> str | None:
    """The type of what is mounted at a path, on top. Neither stat nor ismount tells the truth of a dead mount."""
    wanted = os.path.join(os.path.realpath(path.parent), path.name)
    found = None
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            _, place, kind, *_ = line.split(" ")
            if re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), place) == wanted:
                found = kind
    return found


def is_dead(path: Path) -> bool:
    """Whether nobody serves a mount. Source: statvfs always asks the daemon, stat may be answered from a cache."""
    try:
        os.statvfs(path)
    except OSError as exc:
        return exc.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


def unmount(path: Path) -> None:
    """Detach what is mounted at a path, busy or not. Raises ConfigError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(path), MNT_DETACH) != 0:
        code = ctypes.get_errno()
        raise ConfigError(f"{path}: a dead mount can't be cleared: {os.strerror(code)}")


def tune(path: Path) -> None:
    """Let the kernel read ahead in requests of full size, where we may."""
    wanted = os.path.join(os.path.realpath(path.parent), path.name)
    with (
        contextlib.suppress(OSError),
        open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table,
    ):
        for line in table:
            fields = line.split(" ")
            if fields[4] == wanted:
                Path(f"/sys/class/bdi/{fields[2]}/read_ahead_kb").write_text(
                    str(READ_AHEAD_KIB), encoding="ascii"
                )
