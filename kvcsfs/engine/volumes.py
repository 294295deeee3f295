"""Volumes: the volumes of all mountpoints, from the start of their lanes to their snapshots."""

from __future__ import annotations

import gc
import logging
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import trio

from kvcsfs.config import Config
from kvcsfs.engine.access import Access
from kvcsfs.engine.room import RETRY_SECONDS
from kvcsfs.engine.volume import Volume, Watcher
from kvcsfs.errors import MountpointError

log = logging.getLogger(__name__)

CHECKPOINT_SECONDS = 60.0
ASKED_SECONDS = 0.2  # from the first who asks for a checkpoint: a program makes its directories in one go
REST_SECONDS = 1.0  # between checkpoints that are asked for; 20 times what the last one took, if that is more


class Volumes:
    """A volume for each mountpoint, in the order of the configuration.

    Raises ConfigError when a backing directory can't be used.
    """

    def __init__(self, config: Config, watch: Watcher, access: Access) -> None:
        self._direct = config.backend == "direct"
        self._all: list[Volume] = []
        self._recovering: set[Volume] = set()
        limit = max(64, raise_descriptor_limit() // 2 // len(config.mountpoints))
        try:
            for i, mountpoint in enumerate(config.mountpoints):
                self._all.append(Volume(i, mountpoint, limit, watch, access))
        except BaseException:
            for volume in self._all:
                volume.store.close()
            raise

    def __iter__(self) -> Iterator[Volume]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, position: int) -> Volume:
        return self._all[position]

    def find(self, index: int) -> Volume | None:
        """The volume of a mountpoint index, if there is one; with the direct backend there is one for all."""
        if self._direct:
            return self._all[0]
        return self._all[index] if 0 <= index < len(self._all) else None

    def at(self, index: int) -> Volume:
        """Do what `find` does. Raises MountpointError."""
        volume = self.find(index)
        if volume is None:
            raise MountpointError(f"mountpoint {index} isn't configured, expected 0 to {len(self._all) - 1}")
        return volume

    @asynccontextmanager
    async def running(
        self, background: Callable[[], Awaitable[None]], ending: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[None]:
        """Recover in the background and serve; at the end await `ending`, then write the snapshots.

        `background` is a task beside those of the volumes; it ends with them, before `ending`.
        """
        async with trio.open_nursery() as lanes:
            for volume in self._all:
                await lanes.start(volume.lane.serve)
            try:
                async with trio.open_nursery() as nursery:
                    for volume in self._all:
                        nursery.start_soon(self._tend, volume)
                        nursery.start_soon(volume.room.keep)
                        nursery.start_soon(volume.room.reclaim_loose)
                        nursery.start_soon(volume.scrub.run)
                        nursery.start_soon(self._checkpoints, volume)
                    nursery.start_soon(background)
                    try:
                        yield
                    finally:
                        nursery.cancel_scope.cancel()
                        for volume in self._all:
                            volume.lane.end()
            finally:
                with trio.CancelScope(shield=True):
                    await self._close(ending)

    async def _close(self, ending: Callable[[], Awaitable[None]]) -> None:
        try:
            await ending()
            async with trio.open_nursery() as closing:
                for volume in self._all:
                    closing.start_soon(volume.upkeep.close)
        finally:
            for volume in self._all:
                volume.lane.stop()

    async def _tend(self, volume: Volume) -> None:
        """Background: recover a mountpoint and look after it; again if its directory could not be read, or was gone."""
        while True:
            try:
                await self._recover(volume)
            except OSError as exc:  # the other mountpoints serve; this one misses and is busy
                log.warning("%s: can't be read, trying again: %s", volume.config.path, exc.strerror)
                await trio.sleep(RETRY_SECONDS)
            await volume.upkeep.look_after()

    async def _recover(self, volume: Volume) -> None:
        """Recover; meanwhile the garbage collector would look at all the entries again and again."""
        gc.disable()
        self._recovering.add(volume)
        try:
            await volume.upkeep.recover()
        finally:
            self._recovering.remove(volume)
            if not self._recovering:
                gc.freeze()  # millions of long-lived objects: a full collection would stop the loop for seconds
                gc.enable()
        log.info("%s: %d entries", volume.config.path, len(volume.catalog.index))

    async def recovered(self) -> None:
        """Wait until every mountpoint has its entries."""
        while any(volume.recovering for volume in self._all):
            await trio.sleep(0.01)

    async def _checkpoints(self, volume: Volume) -> None:
        rest, frozen = 0.0, trio.current_time()
        while True:
            with trio.move_on_after(CHECKPOINT_SECONDS):
                await trio.sleep(rest)
                await volume.upkeep.asked()
                await trio.sleep(ASKED_SECONDS)
            if self._recovering and all(v.lane.hung for v in self._recovering):
                gc.enable()  # no entries come, perhaps for days, and what others leave behind must not pile up
            began = trio.current_time()
            try:
                await volume.upkeep.checkpoint()
                rest = max(REST_SECONDS, 20 * (trio.current_time() - began))
            except OSError as exc:
                log.warning("%s: no checkpoint: %s", volume.config.path, exc.strerror)
                rest = CHECKPOINT_SECONDS
            if began - frozen >= CHECKPOINT_SECONDS:
                gc.freeze()  # what was added meanwhile
                frozen = began


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20
