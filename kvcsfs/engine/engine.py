"""Engine: all that a face may call. Asynchronous, a batch a call, so that the index of a pool can stand here too.

Results are in the order of the keys. The failure of one key is a `KvcsError` in its place, the failure of a batch is
raised. A session stands for one connection or one mount.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar, TypeVarTuple

import trio

from kvcsfs import __version__
from kvcsfs.config import Config, MountpointConfig
from kvcsfs.engine import keys
from kvcsfs.engine.access import Access
from kvcsfs.engine.entry import Entry
from kvcsfs.engine.session import Lease, Session, Staged
from kvcsfs.engine.verifier import Verified
from kvcsfs.engine.volume import Volume, Watcher
from kvcsfs.engine.volumes import Volumes
from kvcsfs.errors import (
    BackingError,
    ConfigError,
    ExistsError,
    InvalidKeyError,
    InvalidValueError,
    KvcsError,
    ReservationError,
)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_VALUE_BYTES = 4 << 30
MAX_TTL_SECONDS = 3600.0
EXPIRY_SECONDS = 1.0
# What `reload` takes; of mountpoints, capacity and watermarks.
RELOADED = frozenset({"access", "mountpoints"})
TABLES = {"permissions": "[[prefixes]] or the owner, group and mode of the mount", "places": "[[mounts]]"}


@dataclasses.dataclass(slots=True)
class Opened:
    """Pinned objects. `entries[i]` is None for a miss; `errors` has the positions that failed.

    `fds` are the hits' read-only descriptors in order: the engine's own, valid until the lease is released.
    """

    lease: int
    entries: list[Entry | None]
    errors: dict[int, KvcsError]
    fds: list[int]


class Engine:
    """The store. Build it, then run it: `async with engine.running(): ...`.

    Raises ConfigError when a backing directory can't be used.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.watchers: list[Watcher] = []
        self.access = Access(config.access)
        self.volumes = Volumes(config, self._changed, self.access)
        self._started = time.time()
        self._sessions: set[Session] = set()

    def _changed(self, index: int, names: Collection[str] | None) -> None:
        for watcher in self.watchers:
            watcher(index, names)

    # -- life

    def running(self) -> AbstractAsyncContextManager[None]:
        """Recover in the background and serve; at the end write the snapshots. Sessions must be closed before."""
        return self.volumes.running(self._expire, self._close_sessions)

    async def _close_sessions(self) -> None:
        for session in list(self._sessions):
            await self.close_session(session)

    def reload(self, config: Config) -> None:
        """Take the capacities, watermarks and access rules of another configuration.

        Raises ConfigError, which names what needs a restart; then nothing has changed.
        """
        settings = [f.name for f in dataclasses.fields(Config) if f.name not in RELOADED]
        changed = [
            TABLES.get(name, f"store.{name}")
            for name in settings
            if getattr(config, name) != getattr(self.config, name)
        ]
        if list(map(_fixed, config.mountpoints)) != list(map(_fixed, self.config.mountpoints)):
            changed.append("[[mountpoints]] but for capacity and watermarks")
        if changed:
            raise ConfigError(f"{changed[0]} can't change without a restart; nothing was reloaded")
        if config.access != self.config.access:
            self.access.load(config.access)
            for volume in self.volumes:
                volume.room.access_changed()
        self.config = config
        for volume, mountpoint in zip(self.volumes, config.mountpoints, strict=True):
            volume.room.resize(mountpoint)

    async def _expire(self) -> None:
        while True:
            await trio.sleep(EXPIRY_SECONDS)
            moment = trio.current_time()
            for session in list(self._sessions):
                late = [s.token for s in session.staged.values() if s.expires <= moment]
                if late:
                    await self.abort_many(session, late)

    # -- sessions

    def session(self, user: int, quota_share: int = 4) -> Session:
        """A new session of a user (uid), or of the daemon itself."""
        session = Session(user, quota_share)
        self._sessions.add(session)
        return session

    async def close_session(self, session: Session) -> None:
        """End every lease and reservation of a session. A commit under way completes."""
        session.closed = True
        self._sessions.discard(session)
        with trio.CancelScope(shield=True):
            for lease in list(session.leases):
                self.release(session, lease)
            await self.abort_many(session, list(session.staged))

    # -- reading

    async def query_many(
        self, index: int, names: Sequence[str], renew: bool = False, temporaries: bool = False
    ) -> list[Entry | None]:
        """Look keys up without pinning them."""
        volume = self.volumes.at(index)
        if volume.settling:
            await volume.settled(names)
        found = await volume.find(names, temporaries)
        if any(found):
            volume.lane.check()
        if renew:
            volume.catalog.touch([e for e in found if e is not None], time.time())
        return found

    def is_calm(self, index: int) -> bool:
        """Whether lookups of a mountpoint have nothing to wait for."""
        volume = self.volumes.find(index)
        return volume is None or volume.calm

    def open_ready(
        self, session: Session, index: int, names: Sequence[str], renew: bool = True
    ) -> Opened | None:
        """Do what `open_many` does, at once, if every hit has a descriptor that is open; else None, and do nothing."""
        volume = self.volumes.find(index)
        if volume is None or not volume.calm or volume.lane.stuck:
            return None
        entries = volume.lookup(names, False)
        hits = [e for e in entries if e is not None]
        table = volume.descriptors.of(session.user)
        fds = [fd for e in hits if (fd := table.get(e)) is not None]
        if len(fds) < len(hits):
            return None
        volume.hold(entries, hits)
        return Opened(self._lease(session, volume, hits, renew), entries, {}, fds)

    async def open_many(
        self,
        session: Session,
        index: int,
        names: Sequence[str],
        renew: bool = True,
        temporaries: bool = False,
        verify: bool = False,
    ) -> Opened:
        """Look keys up and pin what is there, under one lease. With `renew` its release counts as a use.

        With `verify` what is unproven is read and compared first: for a face whose readers can't do that.
        """
        volume = self.volumes.at(index)
        if volume.settling:
            await volume.settled(names)
        entries, errors = await volume.open(session, names, temporaries, verify)
        hits = [e for e in entries if e is not None]
        lease = self._lease(session, volume, hits, renew)
        if lease and session.closed:  # the connection went while files were opened
            self.release(session, lease)
            raise ReservationError("the session is closed")
        table = volume.descriptors.of(session.user)
        return Opened(lease, entries, errors, [table[e] for e in hits])

    def _lease(self, session: Session, volume: Volume, hits: list[Entry], renew: bool) -> int:
        """A lease over pinned entries, 0 for none of them."""
        if not hits:
            return 0
        lease = secrets.randbits(62) + 1  # can't be guessed, so it can't be released before it was sent
        session.leases[lease] = Lease(volume, hits, renew)
        return lease

    def release(self, session: Session, lease: int) -> None:
        """Give a lease back; an unknown one is nothing. Its entries count as used now."""
        held = session.leases.pop(lease, None)
        if held is None:
            return
        if held.renew:
            held.volume.catalog.touch(held.entries, time.time())
        held.volume.release(held.entries)

    # -- writing

    async def reserve_many(
        self,
        session: Session,
        index: int,
        names: Sequence[str],
        sizes: Sequence[int],
        if_exists: str = "overwrite",
        ttl_seconds: float = 0.0,
    ) -> list[Staged | KvcsError]:
        """Stage an object for each key. The caller owns the descriptors in what it gets, the session the rest.

        Raises BusyError while recovery runs, MountpointError.
        """
        volume = self.volumes.at(index)
        if volume.settling:
            await volume.settled(names)
        refused = self._refusals(volume, names, sizes, if_exists)
        if refused:
            names = [name for i, name in enumerate(names) if i not in refused]
            sizes = [size for i, size in enumerate(sizes) if i not in refused]

        async def undo(reserved: list[Staged | KvcsError]) -> None:
            await volume.writes.give_up(session, [s for s in reserved if isinstance(s, Staged)])

        results = await volume.lane.step(volume.writes.reserve, session, names, sizes, undo=undo)
        if session.closed:  # the connection went meanwhile
            await volume.lane.finish(undo, results)
            raise ReservationError("the session is closed")
        expires = trio.current_time() + (min(ttl_seconds, MAX_TTL_SECONDS) or MAX_TTL_SECONDS)
        session.add(*[r for r in results if isinstance(r, Staged)], expires=expires)
        for i, refusal in refused.items():
            results.insert(i, refusal)
        return results

    def _refusals(
        self, volume: Volume, names: Sequence[str], sizes: Sequence[int], if_exists: str
    ) -> dict[int, KvcsError]:
        """Why keys can't be put, by position."""
        are_sizes = min(sizes, default=1) > 0 and max(sizes, default=1) <= MAX_VALUE_BYTES
        if if_exists == "overwrite" and are_sizes and keys.are_plain(names):
            return {}
        return {
            i: refusal
            for i, (name, size) in enumerate(zip(names, sizes, strict=True))
            if (refusal := self._refusal(volume, name, size, if_exists))
        }

    def _refusal(self, volume: Volume, name: str, size: int, if_exists: str) -> KvcsError | None:
        """Why a key can't be put, if so."""
        try:
            keys.check(name)
        except KvcsError as exc:
            return exc
        if not 0 < size <= MAX_VALUE_BYTES:
            return InvalidValueError(f"a value of {size} B, expected 1 to {MAX_VALUE_BYTES}")
        if keys.is_temporary(name):
            return InvalidKeyError(f"{name!r} is the name of a temporary file")
        if if_exists != "overwrite" and volume.catalog.index.get(name) is not None:
            return ExistsError(f"{name!r} has a value")
        return None

    async def commit_many(
        self,
        session: Session,
        tokens: Sequence[int],
        checksums: Sequence[bytes],
        if_exists: str = "overwrite",
    ) -> list[KvcsError | None]:
        """Publish staged objects; their descriptors are closed by now. What fails is aborted."""
        results: list[KvcsError | None] = [None] * len(tokens)
        by_volume: dict[Volume, dict[int, Staged]] = {}
        for i, token in enumerate(tokens):
            if staged := session.pop(token):
                staged.entry.checksum = checksums[i]
                by_volume.setdefault(staged.volume, {})[i] = staged
            else:
                results[i] = ReservationError(f"reservation {token} is unknown or has expired")
        for volume, parts in by_volume.items():
            outcomes = await self._commit(volume, list(parts.values()), if_exists)
            for i, outcome in zip(parts, outcomes, strict=True):
                results[i] = outcome
        return results

    async def _commit(
        self, volume: Volume, staged: Sequence[Staged], if_exists: str
    ) -> Sequence[KvcsError | None]:
        try:
            volume.lane.check()
        except BackingError as exc:
            await volume.lane.finish(volume.writes.abort, staged)
            return [exc] * len(staged)
        try:
            return await volume.lane.step(volume.writes.commit, staged, if_exists)
        except BackingError as exc:  # it may still complete, as after a deadline
            return [exc] * len(staged)

    async def abort_many(self, session: Session, tokens: Sequence[int]) -> None:
        """Give reservations back; unknown ones are nothing."""
        by_volume: dict[Volume, list[Staged]] = {}
        for token in tokens:
            if staged := session.pop(token):
                by_volume.setdefault(staged.volume, []).append(staged)
        for volume, parts in by_volume.items():
            await volume.lane.finish(volume.writes.abort, parts)

    async def delete_many(
        self, index: int, names: Sequence[str], temporaries: bool = False
    ) -> list[KvcsError | None]:
        """Remove keys; NotFoundError in the place of one that holds nothing."""
        volume = self.volumes.at(index)
        if volume.settling:
            await volume.settled(names)
        return await volume.lane.step(volume.writes.delete, names, temporaries)

    async def rename(self, index: int, old: str, new: str) -> None:
        """Move a value to another key, replacing what that held. Raises NotFoundError, BackingError."""
        volume = self.volumes.at(index)
        await volume.lane.step(volume.writes.rename, old, new)

    # -- values of unknown size, written by the daemon itself

    async def stage_file(self, session: Session, index: int, name: str, likely: int = 0) -> Staged:
        """Stage a value that grows: write to `fd` after `grow`, end with `commit_file` or `abort_file`.

        With a `likely` size, there may be bytes of another value wherever nothing was written.
        Raises CapacityError, BackingError, BusyError.
        """
        keys.check(name)
        volume = self.volumes.at(index)
        staged = await volume.lane.step(volume.files.stage, name, likely, undo=volume.files.drop)
        if session.closed:
            await volume.lane.finish(volume.files.drop, staged)
            raise ReservationError("the session is closed")
        session.add(staged)
        session.reserved += staged.charged
        return staged

    async def grow(self, session: Session, staged: Staged, size: int) -> None:
        """Reserve for `size` bytes of a staged file. Raises CapacityError, and nothing has changed."""
        await staged.volume.lane.step(self._grow, session, staged, size)

    async def _grow(self, session: Session, staged: Staged, size: int) -> None:
        before = staged.charged
        await staged.volume.files.grow(staged, size)
        session.reserved += staged.charged - before

    async def commit_file(
        self,
        session: Session,
        staged: Staged,
        name: str,
        size: int,
        checksum: bytes | None,
        hold: bool = False,
    ) -> Opened:
        """Publish a staged file as the value of `name`, and close its descriptor. `checksum` None: read it again.

        With `hold` the new entry comes under a lease, so that those who read the file while it was written lose
        nothing to an eviction. Raises what made it fail; then the file is gone, and the key as it was.
        """
        session.pop(staged.token)
        lane = staged.volume.lane
        try:
            lane.check()
        except BackingError:
            await lane.finish(staged.volume.files.drop, staged)
            raise

        async def undo(opened: Opened) -> None:
            self.release(session, opened.lease)

        return await lane.step(self._publish, session, staged, name, size, checksum, hold, undo=undo)

    async def _publish(
        self, session: Session, staged: Staged, name: str, size: int, checksum: bytes | None, hold: bool
    ) -> Opened:
        volume, entry = staged.volume, staged.entry
        await volume.files.publish(staged, name, size, checksum, hold)
        if not hold:
            return Opened(0, [entry], {}, [])
        fd = await volume.descriptor(session, entry)
        lease = secrets.randbits(62) + 1
        session.leases[lease] = Lease(volume, [entry], renew=False)
        return Opened(lease, [entry], {}, [fd])

    async def abort_file(self, session: Session, staged: Staged) -> None:
        """Give a staged file up, and close its descriptor."""
        session.pop(staged.token)
        await staged.volume.lane.finish(staged.volume.files.drop, staged)

    # -- file work of the faces

    async def work(self, index: int, job: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a face's own file work in a thread of a mountpoint.

        Raises BackingError when the file system hangs; what the work returns or raises then is dropped.
        """
        lane = self.volumes.at(index).lane
        return await lane.step(lane.run, job, *args)

    async def brief_work(self, index: int, job: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a face's own file work of microseconds: on the event loop while the file system is prompt."""
        lane = self.volumes.at(index).lane
        (result,) = await lane.step(lane.brief, lambda _, parts: [job(*parts[0])], [args])
        return result

    async def close_fds(self, index: int, fds: Sequence[int]) -> None:
        """Close descriptors that came from a batch of a mountpoint."""
        volume = self.volumes.at(index)
        await volume.lane.finish(volume.close_fds, fds)

    # -- looking and tending

    async def find(self, index: int, name: str) -> Entry | None:
        """The entry of a key as it is now, temporary ones too: no wait for writers, nothing renewed."""
        found: Entry | None = self.volumes.at(index).catalog.index.get(name)
        return found

    async def space(self, index: int) -> tuple[int, int, int]:
        """Capacity, bytes that a put can have without an eviction, and entries."""
        catalog = self.volumes.at(index).catalog
        return catalog.ledger.capacity, max(catalog.room, 0), len(catalog.index)

    def settling(self, index: int) -> dict[str, trio.Event]:
        """Keys whose writers on a mount have all flushed: requests for them wait a moment for the event."""
        return self.volumes.at(index).settling

    def extras(self, index: int) -> dict[str, Any] | None:
        """What faces keep in the snapshot, live and plain; None until it was read, at the end of recovery.

        It is another after the watchers heard that everything changed.
        """
        volume = self.volumes.at(index)
        return None if volume.recovering else volume.extras

    def check_ready(self, index: int) -> None:
        """Raise BusyError or BackingError when nothing can be written."""
        self.volumes.at(index).check_ready()

    def save_soon(self, index: int) -> None:
        """Write the snapshot soon: a face changed what is nowhere else and must not wait for the next one."""
        self.volumes.at(index).upkeep.ask()

    async def usage(self, index: int, prefix: str) -> tuple[int, int, int]:
        """Entries, value bytes and charged bytes of the keys that start with `prefix`. O(1) for a directory."""
        volume = self.volumes.at(index)
        usage = volume.catalog.index.usage(prefix)
        await volume.departed(prefix)
        return usage

    async def page(self, index: int, prefix: str, after: str, limit: int) -> list[Entry]:
        """Entries by key: at most `limit` that start with `prefix` and follow `after`. Renews nothing."""
        volume = self.volumes.at(index)
        page = volume.catalog.index.page(prefix, after, limit)
        await volume.departed(prefix)
        return page

    async def children(self, index: int, directory: str, after: str | None, limit: int) -> list[str]:
        """Names directly in a directory ("" or ending with "/"), see `Index.children`. Renews nothing."""
        return list(itertools.islice(self.volumes.at(index).catalog.index.children(directory, after), limit))

    async def look_many(self, index: int, names: Sequence[str]) -> list[tuple[Entry | None, bool]]:
        """Do what `find` does for many keys, and tell of each whether it is a directory: keys lie below it."""
        tree = self.volumes.at(index).catalog.index
        return [(tree.get(name), tree.is_directory(name + "/")) for name in names]

    async def evict(self, index: int, prefix: str, target: int) -> tuple[int, int]:
        """Evict below a prefix; returns entries and charged bytes."""
        volume = self.volumes.at(index)
        evicted = await volume.lane.step(volume.room.evict, prefix, target)
        await volume.departed(prefix)
        return evicted

    async def remove_prefix(self, index: int, prefix: str) -> tuple[int, int]:
        """Delete every key with a prefix; returns entries and charged bytes."""
        count = charged = 0
        while page := await self.page(index, prefix, "", 256):
            charged += sum(e.charged for e in page)
            count += len(page)
            await self.delete_many(index, [e.key for e in page], True)
        return count, charged

    async def verify_many(self, index: int, names: Sequence[str]) -> list[int]:
        """Read values and drop what is wrong; sizes, 0 for absent or dropped."""
        volume = self.volumes.at(index)
        sizes = await volume.lane.step(volume.verifier.verify, names)
        await volume.find(names, True)  # what is absent may be leaving
        return sizes

    async def verify_after(self, index: int, after: str, limit_bytes: int) -> Verified:
        """Read the values of the keys that follow `after`, about `limit_bytes` of them, and drop what is wrong."""
        volume = self.volumes.at(index)
        return await volume.lane.step(volume.verifier.verify_after, after, limit_bytes)

    def status(self) -> dict[str, Any]:
        """Figures for people and for metrics."""
        return {
            "version": __version__,
            "uptime_seconds": round(time.time() - self._started, 1),
            "backend": self.config.backend,
            "mount": str(self.config.mount) if self.config.mount else None,
            "sessions": len(self._sessions),
            "leases": sum(len(s.leases) for s in self._sessions),
            "reservations": sum(len(s.staged) for s in self._sessions),
            "mountpoints": [volume.status() for volume in self.volumes],
        }

    def check(self) -> None:
        """Assert every invariant."""
        for volume in self.volumes:
            volume.check()


def _fixed(mountpoint: MountpointConfig) -> MountpointConfig:
    """A mountpoint without what can change while it is served."""
    return dataclasses.replace(mountpoint, capacity=0, low_watermark=0.0, high_watermark=0.0)
