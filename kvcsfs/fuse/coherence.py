"""Coherence: what the kernel remembers follows what the store does behind its back.

The engine tells which keys changed; a task finds the nodes that are wrong now; a thread of its own tells the kernel,
as that blocks while the kernel waits for one of our handlers.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Collection

import pyfuse3
import trio
import trio.lowlevel

from kvcsfs.engine import keys
from kvcsfs.fuse.inodes import File
from kvcsfs.fuse.tree import Tree

log = logging.getLogger(__name__)

Place = tuple[int, str]  # mountpoint index, key or directory
JOIN_SECONDS = 2.0
SLICE = 256  # names looked after in one go on the event loop: a few milliseconds


class Coherence:
    """Watches the engine for one mount. `watch` goes into `engine.watchers`."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._keys: dict[Place, File | None] = {}  # with the node that had the key when it changed
        self._directories: dict[Place, None] = {}
        self._renewed: set[int] = set()  # mountpoints that were recovered, or are gone
        self._wake = trio.Event()
        self._thread = threading.Thread(target=self._tell_kernel, name="kvcsfs-invalidate", daemon=True)
        self._stopped = False

    def watch(self, index: int, names: Collection[str] | None) -> None:
        """Note keys whose value came, went or changed, as far as the mount knows anything of them; None: all."""
        if names is None:
            self._renew(index)
            return
        inodes, namespace = self._tree.inodes, self._tree.peek(index)
        for key in names:
            node = inodes.files.get((index, key))
            if node is not None or namespace.knows(key):
                self._keys[index, key] = node or self._keys.get((index, key))
        for nearest in {keys.directory(key) for key in names}:
            for path in (nearest, *keys.parents(nearest[:-1])):
                if path and ((index, path) in inodes.directories or (index, path[:-1]) in inodes.files):
                    self._directories[index, path] = None
        if self._keys or self._directories:
            self._wake.set()

    def _renew(self, index: int) -> None:
        """Note all that the mount knows of a mountpoint, which was recovered, or is gone."""
        self._tree.forget(index)
        self._renewed.add(index)
        inodes = self._tree.inodes
        self._keys.update((place, node) for place, node in inodes.files.items() if place[0] == index)
        self._directories.update((p, None) for p in inodes.directories if p[0] == index and p[1])
        self._wake.set()

    async def run(self) -> None:
        """Look after what was noted, until cancelled."""
        self._thread.start()
        self._renewed.update(range(len(self._tree.engine.volumes)))  # those recovered before anybody watched
        self._wake.set()
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._renewed:
                await self._prune(self._renewed.pop())
            changed, self._keys = self._keys, {}
            around, self._directories = self._directories, {}
            for count, ((index, key), node) in enumerate(changed.items(), 1):
                await self._check_key(index, key, node)
                if not count % SLICE:
                    await trio.lowlevel.checkpoint()
            for count, (index, path) in enumerate(around, 1):
                await self._check_directory(index, path)
                if not count % SLICE:
                    await trio.lowlevel.checkpoint()

    async def _prune(self, index: int) -> None:
        """Drop what is recorded of files that changed while nothing was mounted."""
        namespace = self._tree.peek(index)
        for key in namespace.files():
            entry = await self._tree.engine.find(index, key)
            node = self._tree.inodes.files.get((index, key))
            if (node is None or node.writer is None) and (entry is None) != namespace.is_file(key):
                namespace.forget(key)

    async def _check_key(self, index: int, key: str, node: File | None) -> None:
        """Look after a key that changed, and after `node`, which may have lost it since, or the kernel's interest."""
        inodes, namespace = self._tree.inodes, self._tree.peek(index)
        if node is not None:
            await self._tree.recheck(node)
        node = inodes.files.get((index, key), node)
        entry = await self._tree.engine.find(index, key)
        if node is not None and (node.writer is not None or node.entry is entry):
            return
        if entry is not None or not namespace.is_file(key):
            namespace.forget(key)  # what was set on another value, or on one that is gone

    async def _check_directory(self, index: int, path: str) -> None:
        inodes = self._tree.inodes
        ((_, there),) = await self._tree.look(index, [path[:-1]])
        node = inodes.directories.get((index, path))
        if node is not None and not there:
            inodes.outdate(node)
        beside = inodes.files.get((index, path[:-1]))
        if beside is not None and there != beside.name.startswith(b"%="):
            inodes.outdate(beside)

    def _tell_kernel(self) -> None:
        while (entry := self._tree.inodes.outdated.get()) is not None:
            if self._stopped:
                continue
            number, name = entry
            try:
                pyfuse3.invalidate_entry(pyfuse3.InodeT(number), pyfuse3.FileNameT(name))
            except OSError as exc:
                if exc.errno != errno.ENOENT:  # which says that the kernel has forgotten it itself
                    log.warning("the kernel keeps %r: %s", name, exc.strerror)

    def stop(self) -> bool:
        """End the thread; blocks a moment. False if the kernel doesn't let it go: then the session must stay."""
        self._stopped = True
        self._tree.inodes.outdated.put(None)
        if self._thread.is_alive():
            self._thread.join(JOIN_SECONDS)
        return not self._thread.is_alive()
