"""Upkeep: what one mountpoint needs at its start, while it serves and at its end; no request is served here."""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING

import trio

from kvcsfs.engine import jobs, recovery
from kvcsfs.engine.catalog import Catalog
from kvcsfs.engine.directory import AWAY
from kvcsfs.engine.entry import Entry
from kvcsfs.errors import BackingError

if TYPE_CHECKING:
    from kvcsfs.engine.volume import Volume

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0


class Upkeep:
    """The upkeep of a volume. `recovery` tells how far the last recovery came."""

    def __init__(self, volume: Volume) -> None:
        self.recovery = recovery.Watch()
        self._volume = volume
        self._lane, self._store = volume.lane, volume.store
        self._asked = trio.Event()
        self._failures = 0  # as counted at the last look

    # -- start

    async def recover(self) -> None:
        """Fill the catalog from the snapshot or the footers; entries over the capacity leave, oldest first."""
        volume = self._volume
        self.recovery = recovery.Watch()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._stop_recovery)
            outcome = await self._lane.run(self._recovered)
            nursery.cancel_scope.cancel()
        if outcome is None:
            await trio.lowlevel.checkpoint()  # raises Cancelled, the only reason for it
            raise AssertionError("recovery stopped and nobody stops")
        if isinstance(outcome, OSError):
            raise outcome
        found, catalog, unproven = outcome
        catalog.ledger.capacity = volume.catalog.ledger.capacity
        catalog.domain = volume.access.domain
        volume.catalog = catalog
        volume.extras.update(found.extras)
        volume.scrub.begin(unproven)
        await volume.room.clear(0)
        if volume.access.restricted:
            await volume.room.drop_free()
        volume.recovering = False
        volume.room.wake()  # the capacity may be another by now
        volume.changed(None)

    def _recovered(self) -> tuple[recovery.Found, Catalog, list[Entry]] | OSError | None:
        """In a thread: the catalog is built aside, as the event loop reads the present one. None: the daemon stops."""
        try:
            found = recovery.recover(self._store, self.recovery)
        except recovery.Stopped:
            return None
        except OSError as exc:
            return exc
        catalog = recovery.load(found, self._volume.catalog.ledger.capacity)
        return found, catalog, [e for e in found.entries if not e.proven]

    async def _stop_recovery(self) -> None:
        """Tell the thread when the daemon stops: a cancellation doesn't reach it."""
        try:
            await trio.sleep_forever()
        finally:
            self.recovery.stopped = True

    # -- while it serves

    def ask(self) -> None:
        """Have a checkpoint soon."""
        self._asked.set()

    async def asked(self) -> None:
        """Wait until somebody wants a checkpoint soon."""
        await self._asked.wait()

    async def checkpoint(self, clean: bool = False) -> None:
        """Write the snapshot; `clean` says that it is exact and nothing follows it."""
        volume = self._volume
        self._asked = trio.Event()
        if volume.recovering or volume.detached:
            return
        writer = await self._lane.run(recovery.SnapshotWriter, self._store.directory)
        try:
            after = ""
            while rows := volume.catalog.index.page("", after, recovery.SLICE):
                after = rows[-1].key
                await self._lane.run(writer.add, recovery.rows(rows))
            free = list(volume.catalog.free_slots()) if clean else []
            await self._lane.run(writer.finish, free, volume.extras, clean)
        except OSError:
            await self._lane.run(writer.abandon)
            raise

    async def look_after(self) -> None:
        """Tell when the backing directory goes or takes no writes, and when it is back. Returns to have it recovered.

        One that is gone is given up at the second look, once nobody has anything of it: its file system can end then,
        be repaired and be mounted again.
        """
        volume = self._volume
        while True:
            if not self._store.given_up:
                await self._look()
            if self._store.given_up:
                await self._look_for_it()
            if volume.recovering and not volume.detached:
                return
            await trio.sleep(LOOK_SECONDS)

    async def _look(self) -> None:
        volume = self._volume
        writes = bool(volume.trouble) or volume.counters["io_errors"] != self._failures
        self._failures = volume.counters["io_errors"]
        there, failed = await self._lane.run_by_path(jobs.examine, self._store, writes)
        if volume.detached and not there and not volume.held:
            await self._give_up()
            return
        volume.detached = not there
        volume.unwritable = not there or (failed is not None and failed.errno != errno.ENOSPC)
        self._tell_trouble(AWAY if not there else str(failed.strerror) if failed else "")

    async def _give_up(self) -> None:
        """Forget the directory and close all that is open of it. Up to the await nothing else runs."""
        volume, catalog = self._volume, self._volume.catalog
        volume.catalog = Catalog(catalog.ledger.capacity, volume.access.domain)
        volume.extras, volume.recovering = {}, True
        volume.scrub.begin([])
        fds = [slot.fd for slot in catalog.free_slots() if slot.fd >= 0]
        fds += [*volume.descriptors.clear(), *self._store.give_up()]
        volume.changed(None)
        await self._lane.run(jobs.let_go, fds, catalog)

    async def _look_for_it(self) -> None:
        """Take the directory up if it is back: the same store, on whatever file system."""
        trouble = await self._lane.run_by_path(jobs.take_up, self._store)
        self._volume.detached = self._volume.unwritable = bool(trouble)
        self._tell_trouble(trouble)

    def _tell_trouble(self, trouble: str) -> None:
        volume = self._volume
        if trouble and trouble != volume.trouble:
            log.warning("%s: in trouble: %s", volume.config.path, trouble)
        elif volume.trouble and not trouble:
            log.info("%s: out of trouble", volume.config.path)
        volume.trouble = trouble

    # -- end

    async def close(self) -> None:
        """Write the last snapshot and give the directory up. Without one the next start reads the footers."""
        try:
            await self._lane.step(self._close)
        except BackingError:  # its descriptors go with the process: closing them would wait, too
            log.warning("%s: no snapshot: the backing file system doesn't answer", self._volume.config.path)

    async def _close(self) -> None:
        volume = self._volume
        await volume.room.reclaim_unheld()
        held = [s.fd for s in volume.catalog.free_slots() if s.fd >= 0]
        await volume.close_fds([*volume.descriptors.clear(), *held])  # first, so that the snapshot finds one
        try:
            await self.checkpoint(clean=not volume.catalog.retired)
        except OSError as exc:
            log.warning("%s: no snapshot: %s", volume.config.path, exc.strerror)
        await self._lane.run(self._store.close)
