"""Mount: brings the POSIX face up at a directory and takes it down again."""

from __future__ import annotations

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
from kvcsfs.fuse.dispatch import Dispatch
from kvcsfs.fuse.guard import Guard
from kvcsfs.fuse.inodes import Inodes
from kvcsfs.fuse.operations import Operations
from kvcsfs.fuse.tree import Tree
from kvcsfs.mounts import NAME, TYPE, bind, clear, device, mounted, tune, unmount

log = logging.getLogger(__name__)

DEVICE = "/dev/fuse"
ANSWER_SECONDS = 10.0
STOP_SECONDS = 5.0
CAP_SYS_ADMIN = 21


class Mount:
    """The mount of a running engine. One a process: pyfuse3 has one session."""

    def __init__(self, engine: Engine, path: Path) -> None:
        self._engine = engine
        self._path = path
        inodes = Inodes()
        self._tree = Tree(engine, inodes)
        self._contents = Contents(engine, inodes, self._tree.namespace, self._tree.peek)
        self._coherence = Coherence(self._tree)
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._serving = True
        self._stopping = False
        self._bound: list[Path] = []
        self._guard: Guard | None = None
        self._device: str | None = None  # once it is mounted

    async def start(self, nursery: trio.Nursery) -> None:
        """Mount, and return when the mount answers. Raises ConfigError; then nothing is mounted."""
        await trio.to_thread.run_sync(prepare, self._path, abandon_on_cancel=True)
        config = self._engine.config
        options = {f"fsname={NAME}", f"subtype={NAME}", "default_permissions"}
        if may_mount():
            options.add("allow_other")
        if config.mount_read_only:
            options.add("ro")
        operations = Operations(self._tree, self._contents, config.permissions, config.mount_xattrs)
        try:
            pyfuse3.init(operations, str(self._path), options)
        except RuntimeError as exc:
            raise ConfigError(f"{self._path}: can't be mounted: {exc}") from exc
        self._device = device(self._path)
        Dispatch().install()
        self._engine.watchers.append(self._coherence.watch)
        nursery.start_soon(self._run)
        try:
            self._guard = Guard(self._path, self._device)
        except OSError as exc:
            log.warning("%s: no guard: %s", self._path, exc.strerror)
        with trio.move_on_after(ANSWER_SECONDS):
            await trio.to_thread.run_sync(os.statvfs, self._path, abandon_on_cancel=True)
            tune(self._path)
            try:
                await trio.to_thread.run_sync(self._bind, abandon_on_cancel=True)
            except ConfigError:
                await self.stop()
                raise
            return
        await self.stop()
        raise ConfigError(f"{self._path}: mounted, but it doesn't answer")

    def _bind(self) -> None:
        """Show it at its further places."""
        for place in self._engine.config.places:
            bind(self._path, place.prefix, place.path, place.read_only)
            self._bound.append(place.path)

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
        for path in self._bound:
            if mounted(path) == TYPE:  # else somebody was faster
                unmount(path)
        self._engine.watchers.remove(self._coherence.watch)
        await self._contents.close()
        if await trio.to_thread.run_sync(self._coherence.stop):
            # Closes the connection first, so that programs waiting for us get an error, and then detaches.
            pyfuse3.close(unmount=True)
        # It is still mounted if a thread is in a call of the session, which must not go then, or if somebody aborted
        # the connection: libfuse takes that for unmounted (lib/mount.c, fuse_kern_unmount).
        if device(self._path) == self._device:
            unmount(self._path)
        if self._guard is not None:
            self._guard.dismiss()

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
    clear(path)


def may_mount() -> bool:
    """Whether mount(2) is ours to call: root, or a user whom CAP_SYS_ADMIN was given. Source: capabilities(7)."""
    effective = re.search(
        r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE
    )
    return effective is not None and bool(int(effective[1], 16) >> CAP_SYS_ADMIN & 1)
