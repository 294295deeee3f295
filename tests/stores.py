"""Stores for tests: configuration, engines that run, values, and what lies on disk."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import xxhash

from kvcsfs.config import Config, MountpointConfig
from kvcsfs.engine import jobs, recovery
from kvcsfs.engine.engine import Engine
from kvcsfs.engine.entry import BLOCK, Entry, charge
from kvcsfs.engine.lane import Lane
from kvcsfs.engine.ledger import Ledger
from kvcsfs.engine.session import Session, Staged
from kvcsfs.engine.store import SlotStore
from kvcsfs.engine.syscalls import write_all
from kvcsfs.errors import KvcsError

CAPACITY = 4 << 20
OBJECT = 256 << 10  # charged bytes of a value of VALUE bytes
VALUE = OBJECT - BLOCK
COUNT = CAPACITY // OBJECT  # so many of them fill a store


def checksum(value: bytes) -> bytes:
    """xxh3-128 as the SDK computes it."""
    return xxhash.xxh3_128_digest(value)


def entry(key: str, size: int = 100, slot: int = 1, generation: int = 1) -> Entry:
    """An entry of no file."""
    return Entry(key, slot, size, bytes(16), generation, 0.0)


def config(path: Path, capacity: int = CAPACITY, mountpoints: int = 1, backend: str = "direct") -> Config:
    """A configuration with backing directories below `path`. No room is kept, nothing verified: tests count."""
    points = []
    for i in range(mountpoints):
        data = path / f"data{i}"
        data.mkdir(parents=True, exist_ok=True)
        points.append(MountpointConfig(data, capacity, 0.0, 0.0, scrub_rate=0))
    return Config(tuple(points), path / "sock", backend=backend)


def unreadable(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have the recovery of the directory of this name fail for ever."""
    real = recovery.recover

    def failing(store: SlotStore, watch: recovery.Watch) -> recovery.Found:
        if store.directory.path.name == name:
            raise OSError(errno.EIO, "Input/output error")
        return real(store, watch)

    monkeypatch.setattr(recovery, "recover", failing)


@asynccontextmanager
async def running(settings: Config) -> AsyncIterator[Engine]:
    """An engine that has recovered; at the end its invariants are checked and it stops cleanly."""
    engine = Engine(settings)
    async with engine.running():
        await engine.volumes.recovered()
        yield engine
        engine.check()


async def reserve(engine: Engine, session: Session, key: str, size: int, index: int = 0) -> Staged:
    """Reserve one key, which must succeed."""
    (staged,) = await engine.reserve_many(session, index, [key], [size])
    assert isinstance(staged, Staged), staged
    return staged


async def put(
    engine: Engine, session: Session, key: str, value: bytes, index: int = 0, if_exists: str = "overwrite"
) -> KvcsError | None:
    """Store one value as a well-behaved client does; the failure, if any."""
    (staged,) = await engine.reserve_many(session, index, [key], [len(value)], if_exists)
    if isinstance(staged, KvcsError):
        return staged
    write(staged, value)
    (result,) = await engine.commit_many(session, [staged.token], [checksum(value)], if_exists)
    return result


def write(staged: Staged, value: bytes) -> None:
    """Write a staged value and close its descriptor."""
    write_all(staged.fd, value, 0)
    os.close(staged.fd)


async def get(engine: Engine, session: Session, key: str, index: int = 0) -> bytes | None:
    """Read one value; None for a miss."""
    opened = await engine.open_many(session, index, [key])
    try:
        if opened.errors:
            raise opened.errors[0]
        (found,) = opened.entries
        return None if found is None else os.pread(opened.fds[0], found.size, 0)
    finally:
        engine.release(session, opened.lease)


async def keys(engine: Engine, index: int = 0) -> list[str]:
    """Every key."""
    return [e.key for e in await engine.page(index, "", "", 1 << 20)]


async def _in_a_thread(self: Lane, job: Callable[..., Any], *columns: Any) -> Any:
    """Brief work in a thread too, so that the loop runs on while a gate is closed."""
    return await self.run(job, self._store, *columns)


class Gate:
    """Stops a job in its worker thread until the test has done what must come in between."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.reached, self.go = trio.Event(), trio.Event()
        self._real = getattr(jobs, name)
        monkeypatch.setattr(jobs, name, self._wait)
        monkeypatch.setattr(Lane, "brief", _in_a_thread)

    def _wait(self, *args: object) -> object:
        if not self.go.is_set():
            trio.from_thread.run_sync(self.reached.set)
            trio.from_thread.run(self.go.wait)
        return self._real(*args)


async def settle(engine: Engine) -> None:
    """Wait until nothing is left to be reclaimed. By the real clock, as worker threads do that."""
    deadline = time.monotonic() + 10
    while any(not e.pins for v in engine.volumes for e in v.catalog.retired):
        assert time.monotonic() < deadline
        await trio.sleep(0.001)


def slot_files(data: Path) -> list[Path]:
    """Every file below slots/."""
    return sorted(p for p in (data / "slots").rglob("*") if p.is_file())


def bytes_on_disk(data: Path) -> int:
    """The sum of their sizes; what is removed meanwhile has none."""
    total = 0
    for path in slot_files(data):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def stored(store: SlotStore, key: str, value: bytes, generation: int | None = None) -> Entry:
    """Put one object into a store without an engine, committed."""
    slot = store.directory.number()
    fd = store.create(slot, charge(len(value)))
    os.pwrite(fd, value, 0)
    os.close(fd)
    made = Entry(key, slot, len(value), checksum(value), generation or store.directory.number(), 1000.0)
    store.seal(made)
    return made


def path_of(data: Path, slot: int) -> Path:
    """The file of a slot, as docs/format.md says."""
    return data / "slots" / f"{slot % 256:02x}" / f"{slot:x}"


def open_count(path: Path) -> int:
    """Descriptors of this process that are open on a path."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)") == str(path)
        except OSError:
            continue
    return found


def values(names: Sequence[str], size: int = 5000) -> dict[str, bytes]:
    """A value of its own for each key."""
    return {name: (name.encode() * size)[:size] for name in names}


def ledger(engine: Engine, index: int = 0) -> Ledger:
    """The accounts of one mountpoint."""
    return engine.volumes[index].catalog.ledger
