"""A backing directory that goes is let go when nobody has anything of it, and taken up again when it is back."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from kvcs import KvcsLowLevelClient, LLBatchOptions, LLGetItemOpt, LLPutItem
from kvcsfs import wire
from kvcsfs.config import Config, MountpointConfig
from kvcsfs.engine import jobs, lane, upkeep
from kvcsfs.engine.engine import Engine
from kvcsfs.engine.entry import Entry
from kvcsfs.engine.session import Session
from kvcsfs.engine.store import SlotStore
from kvcsfs.errors import BackingError, ConfigError
from tests.daemons import Daemon, store_file
from tests.faults.loop import make_image
from tests.needs import needs_fuse, needs_root
from tests.rawclient import RawClient
from tests.stores import get, keys, open_count, put, reserve, running, settle, values, write

pytestmark = [pytest.mark.fault, needs_root]

AWAY = "the backing directory was unmounted or replaced"
LET_GO = f"{AWAY}, and is let go until it is back"
_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN: from now on the file system fails, as when its disk is gone


@pytest.fixture
def some_looks(
    monkeypatch: pytest.MonkeyPatch, expected_warnings: list[str]
) -> Callable[[], Awaitable[None]]:
    """Has directories looked after often. The result waits until that of mountpoint 1 was, a few times."""
    monkeypatch.setattr(upkeep, "LOOK_SECONDS", 0.02)
    expected_warnings.append(f"in trouble: {AWAY}")
    looks: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        real = getattr(jobs, name)

        def look(store: SlotStore, *args: Any) -> Any:
            result = real(store, *args)
            looks.extend([name] * (store.directory.path.name != "sound"))
            return result

        return look

    for name in ("examine", "take_up"):
        monkeypatch.setattr(jobs, name, noted(name))

    async def some() -> None:
        enough = len(looks) + 4
        await until(lambda: len(looks) >= enough)

    return some


class Disk:
    """An ext4 of 16 MiB on a loop device, mounted at `path`."""

    def __init__(self, path: Path, image: Path) -> None:
        self.path = path
        make_image(image, 16 << 20)
        path.mkdir()
        self._device = run("losetup", "-f", "--show", image)
        self.mount()

    def mount(self) -> None:
        run("mount", self._device, self.path)

    def fail(self) -> None:
        """All that was written is on it; from now on it fails."""
        run("sync", "-f", self.path)
        root = os.open(self.path, os.O_RDONLY)
        fcntl.ioctl(root, _SHUTDOWN, struct.pack("I", 2))
        os.close(root)

    def unmount(self) -> None:
        """What is open stays open."""
        run("umount", "-l", self.path)
        assert list(self.path.iterdir()) == []

    def is_free(self) -> bool:
        """Whether nothing in the kernel uses it, so that it can be checked: checks and repairs it."""
        checked = subprocess.run(["e2fsck", "-f", "-y", self._device], capture_output=True, check=False)
        if checked.returncode > 1:  # 1: errors were corrected
            assert b"in use" in checked.stdout + checked.stderr, checked
        return checked.returncode <= 1

    def remove(self) -> None:
        subprocess.run(["umount", "-l", self.path], capture_output=True, check=False)
        run("losetup", "-d", self._device)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "disk", tmp_path / "disk.img")
    yield made
    made.remove()


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def beside(tmp_path: Path, disk: Path) -> Config:
    """Mountpoint 0 is sound, mountpoint 1 is on the disk."""
    (tmp_path / "sound").mkdir()
    points = [MountpointConfig(p, 1 << 30, 0.0, 0.0, scrub_rate=0) for p in (tmp_path / "sound", disk)]
    return Config(tuple(points), tmp_path / "sock", backend="pooled")


def state(engine: Engine) -> tuple[str, str]:
    """Of mountpoint 1."""
    status = engine.status()["mountpoints"][1]
    return status["state"], status["trouble"]


async def until(true: Callable[[], bool]) -> None:
    with trio.fail_after(20):
        while not true():
            await trio.sleep(0.01)


@asynccontextmanager
async def let_go(tmp_path: Path, path: Path, away: Path) -> AsyncIterator[tuple[Engine, Session]]:
    """An engine whose mountpoint 1 is let go, and moved to another path; "k" is in it."""
    os.mkdir(path)
    async with running(beside(tmp_path, path)) as engine:
        session = engine.session(0)
        assert await put(engine, session, "k", b"value", 1) is None
        os.rename(path, away)
        await until(lambda: state(engine) == ("failing", LET_GO))
        yield engine, session


def content(path: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a directory, with the time of its last change."""
    return {
        str(p): (p.read_bytes(), p.stat().st_mtime_ns)
        for p in path.rglob("*")
        if p.is_file() and "sound" not in p.parts
    }


@pytest.mark.parametrize("fails", [False, True], ids=["sound", "shut down"])
async def test_a_file_system_that_was_repaired(tmp_path, disk, some_looks, expected_warnings, fails):
    expected_warnings += ["in trouble: (Input/output error|Read-only)"] * fails
    kept = values([f"m/{i}" for i in range(20)], 20_000)
    async with running(beside(tmp_path, disk.path)) as engine:
        session, volume = engine.session(0), engine.volumes[1]
        for name, value in {**kept, "m/gone": b"x" * 5000}.items():
            assert await put(engine, session, name, value, 1) is None
        for name in reversed(kept):  # the last is the least recently used
            assert await get(engine, session, name, 1) == kept[name]
        await engine.delete_many(1, ["m/gone"])
        assert volume.status()["descriptors"] and any(s.fd >= 0 for s in volume.catalog.free_slots())
        engine.extras(1)["face"] = "its records"
        await volume.upkeep.checkpoint()
        before = volume.catalog.index.get("m/0")
        if fails:
            disk.fail()
        disk.unmount()
        await until(lambda: state(engine) == ("failing", LET_GO))
        await until(disk.is_free)
        assert not before.live, "or a ring of entries would stay in memory"
        assert await keys(engine, 1) == []
        assert await get(engine, session, "m/0", 1) is None
        assert engine.extras(1) is None
        with pytest.raises(BackingError, match=AWAY):
            await put(engine, session, "new", b"x", 1)
        with pytest.raises(BackingError, match=AWAY):
            engine.check_ready(1)
        assert await engine.verify_many(1, ["m/0"]) == [0]
        await volume.upkeep.checkpoint()
        volume.store.probe()
        engine.reload(engine.config)
        assert await put(engine, session, "new", b"x", 0) is None
        disk.mount()
        await until(lambda: state(engine) == ("ready", ""))
        assert [e.key for e in volume.catalog.victims()] == list(reversed(kept))
        assert engine.extras(1)["face"] == "its records"
        for name, value in kept.items():
            assert await get(engine, session, name, 1) == value
        assert await put(engine, session, "m/0", b"another", 1) is None
        after = volume.catalog.index.get("m/0")
        assert after.generation > before.generation and after.generation >> 40 == 2
        assert await get(engine, session, "m/0", 1) == b"another"
        assert engine.status()["mountpoints"][1]["puts"] == 22
    disk.unmount()
    assert disk.is_free()
    disk.mount()
    async with running(Config((MountpointConfig(disk.path, 1 << 30),), tmp_path / "sock")) as engine:
        assert await get(engine, engine.session(0), "m/0") == b"another"
        assert len(await keys(engine)) == len(kept)


async def test_it_goes_again_and_the_daemon_stops(tmp_path, disk, some_looks):
    async with running(beside(tmp_path, disk.path)) as engine:
        session = engine.session(0)
        assert await put(engine, session, "k", b"value", 1) is None
        for _ in range(2):
            disk.unmount()
            await until(lambda: state(engine) == ("failing", LET_GO))
            disk.mount()
            await until(lambda: state(engine) == ("ready", ""))
            assert await get(engine, session, "k", 1) == b"value"
        disk.unmount()
        await until(lambda: state(engine) == ("failing", LET_GO))
    assert disk.is_free()


@pytest.mark.parametrize("job", ["examine", "take_up"])
async def test_a_path_that_hangs_does_not_keep_the_daemon_from_its_stop(
    tmp_path, some_looks, monkeypatch, job
):
    """The store itself answers, so that its file system isn't taken for one that hangs."""
    monkeypatch.setattr(lane, "LATE_SECONDS", 0.1)
    path, away = tmp_path / "disk", tmp_path / "away"
    go, began = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        began.set()
        go.wait()

    try:
        with trio.fail_after(20):
            async with let_go(tmp_path, path, away) as (engine, _):
                if job == "examine":
                    away.rename(path)
                    await until(lambda: state(engine) == ("ready", ""))
                monkeypatch.setattr(jobs, job, hang)
                await until(began.is_set)
    finally:
        go.set()


async def test_nothing_else_at_the_path_is_touched(tmp_path, some_looks):
    path, away = tmp_path / "disk", tmp_path / "away"
    async with let_go(tmp_path, path, away) as (engine, session):
        assert open_count(away) == open_count(away / "VERSION") == open_count(away / "slots") == 0
        (tmp_path / "empty").mkdir()
        (tmp_path / "store").mkdir()
        SlotStore(tmp_path / "store").close()
        (tmp_path / "store" / "slots" / "00" / "100").write_bytes(bytes(8192))  # recovery would remove it
        (tmp_path / "file").write_text("no directory")
        before = content(tmp_path)
        for name in ("empty", "store", "file"):
            (tmp_path / name).rename(path)
            await some_looks()
            assert state(engine)[0] == "failing"
            if name == "store":
                version = os.open(path / "VERSION", os.O_RDONLY)
                fcntl.flock(version, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.close(version)
            path.rename(tmp_path / name)
        assert content(tmp_path) == before
        assert list((tmp_path / "empty").iterdir()) == []
        away.rename(path)
        await until(lambda: state(engine) == ("ready", ""))
        assert await get(engine, session, "k", 1) == b"value"


async def test_a_directory_that_another_daemon_has_meanwhile(tmp_path, some_looks, expected_warnings):
    expected_warnings.append("in trouble: .*in use by another kvcsfs daemon")
    path, away = tmp_path / "disk", tmp_path / "away"
    async with let_go(tmp_path, path, away) as (engine, session):
        other = SlotStore(away)
        away.rename(path)
        await until(lambda: "in use by another kvcsfs daemon" in state(engine)[1])
        with pytest.raises(BackingError, match="in use by another kvcsfs daemon"):
            await put(engine, session, "new", b"x", 1)
        other.close()
        await until(lambda: state(engine) == ("ready", ""))
        assert await get(engine, session, "k", 1) == b"value"


async def test_it_goes_while_it_is_recovered(tmp_path, disk, some_looks, monkeypatch):
    async with running(beside(tmp_path, disk.path)) as engine:
        session, volume = engine.session(0), engine.volumes[1]
        assert await put(engine, session, "k", b"value", 1) is None
        disk.unmount()
        await until(lambda: volume.store.given_up)
        real = volume.upkeep.recover

        async def recover() -> None:
            monkeypatch.setattr(volume.upkeep, "recover", real)
            assert state(engine)[0] == "recovering"
            disk.unmount()
            await real()

        monkeypatch.setattr(volume.upkeep, "recover", recover)
        disk.mount()
        await until(lambda: volume.upkeep.recover is real)
        await until(lambda: state(engine) == ("failing", LET_GO))
        assert disk.is_free()
        disk.mount()
        await until(lambda: state(engine) == ("ready", ""))
        assert await get(engine, session, "k", 1) == b"value"


async def test_a_reader_keeps_it(tmp_path, disk, some_looks):
    async with running(beside(tmp_path, disk.path)) as engine:
        session, volume = engine.session(0), engine.volumes[1]
        assert await put(engine, session, "k", b"value", 1) is None
        opened = await engine.open_many(session, 1, ["k"])
        disk.unmount()
        await until(lambda: state(engine) == ("failing", AWAY))
        await some_looks()
        assert state(engine) == ("failing", AWAY)
        assert os.pread(opened.fds[0], 5, 0) == b"value"
        assert not disk.is_free()
        entry = opened.entries[0]
        disk.mount()  # the same one, which has not ended
        await until(lambda: state(engine) == ("ready", ""))
        assert volume.catalog.index.get("k") is entry, "it goes on, nothing is recovered"
        disk.unmount()
        await until(lambda: state(engine) == ("failing", AWAY))
        await some_looks()
        assert os.pread(opened.fds[0], 5, 0) == b"value"
        engine.release(session, opened.lease)
        await until(lambda: state(engine) == ("failing", LET_GO))
        await until(disk.is_free)


async def test_a_reader_of_a_value_that_was_replaced_keeps_it(tmp_path, disk, some_looks):
    async with running(beside(tmp_path, disk.path)) as engine:
        session = engine.session(0)
        assert await put(engine, session, "k", b"value", 1) is None
        opened = await engine.open_many(session, 1, ["k"])
        assert await put(engine, session, "k", b"newer", 1) is None
        disk.unmount()
        await until(lambda: state(engine) == ("failing", AWAY))
        await some_looks()
        assert os.pread(opened.fds[0], 5, 0) == b"value"
        assert not disk.is_free()
        engine.release(session, opened.lease)
        await until(disk.is_free)


@pytest.mark.parametrize("end", ["commit", "abort"])
async def test_a_writer_keeps_it(tmp_path, disk, some_looks, end):
    async with running(beside(tmp_path, disk.path)) as engine:
        session = engine.session(0)
        staged = await reserve(engine, session, "k", 5, 1)
        disk.unmount()
        await until(lambda: state(engine) == ("failing", AWAY))
        await some_looks()
        assert not disk.is_free()
        write(staged, b"value")
        if end == "commit":
            assert await engine.commit_many(session, [staged.token], [bytes(16)]) == [None]
        else:
            await engine.abort_many(session, [staged.token])
        await until(lambda: state(engine) == ("failing", LET_GO))
        await until(disk.is_free)
        disk.mount()
        await until(lambda: state(engine) == ("ready", ""))
        assert await keys(engine, 1) == ["k"] * (end == "commit")
        await settle(engine)


async def test_work_under_way_keeps_it(tmp_path, disk, some_looks, monkeypatch):
    """A verification has the files open that it reads."""
    go, began = trio.Event(), trio.Event()
    real = SlotStore.verify

    def verify(self: SlotStore, entry: Entry) -> bool:
        trio.from_thread.run_sync(began.set)
        trio.from_thread.run(go.wait)
        return bool(real(self, entry))

    monkeypatch.setattr(SlotStore, "verify", verify)
    async with running(beside(tmp_path, disk.path)) as engine, trio.open_nursery() as nursery:
        assert await put(engine, engine.session(0), "k", b"value", 1) is None
        nursery.start_soon(engine.verify_many, 1, ["k"])
        await began.wait()
        disk.unmount()
        await until(lambda: state(engine) == ("failing", AWAY))
        await some_looks()
        assert not disk.is_free()
        go.set()
        await until(lambda: state(engine) == ("failing", LET_GO))
        await until(disk.is_free)


def test_a_store_that_was_given_up_is_closed_once(tmp_path):
    store = SlotStore(tmp_path)
    number, store_id = store.directory.number(), store.directory.store_id
    fds = store.give_up()
    assert len(fds) == 3 and store.given_up and not store.directory.is_there()
    for fd in fds:
        os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        store.open_read(1)
    store.probe()
    store.close()
    (tmp_path / "VERSION").rename(tmp_path / "other")
    with pytest.raises(ConfigError, match=AWAY):
        store.take_up()
    assert not (tmp_path / "VERSION").exists()
    assert store.given_up
    (tmp_path / "other").rename(tmp_path / "VERSION")
    store.take_up()
    assert store.directory.store_id == store_id and store.directory.number() > number + (1 << 39)
    store.close()
    store.close()


# -- a daemon with a mount


def status(socket: Path) -> tuple[str, str]:
    with RawClient(socket) as client:
        point = client.ask(wire.Status(2), wire.StatusReply).status["mountpoints"][1]
    return point["state"], point["trouble"]


def wait(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read(client: KvcsLowLevelClient, key: str, where: LLBatchOptions) -> bytes:
    buffer = bytearray(100_000)
    (result,) = client.ll_batch_get_into_items([LLGetItemOpt(key)], [buffer], opts=where)
    return bytes(buffer[: result.status])


@pytest.mark.mount
@needs_fuse
def test_a_daemon_with_a_mount(tmp_path, disk):
    (tmp_path / "sound").mkdir()
    socket, shown = tmp_path / "sock", tmp_path / "mnt" / ".mountpoints" / "1"
    file = store_file(tmp_path, tmp_path / "sound", disk.path, capacity="8MiB", mount=True)
    value, there = b"value" * 10_000, LLBatchOptions(mountpoint_index=1)
    prelude = "from kvcsfs.engine import upkeep; upkeep.LOOK_SECONDS = 0.05"
    with Daemon(file, prelude) as daemon, KvcsLowLevelClient(socket) as client:
        assert client.ll_batch_put([LLPutItem(k, value) for k in ("d/a", "d/b")], opts=there)[0].status >= 0
        (shown / "made").mkdir(mode=0o711)
        (shown / "made" / "empty").touch()
        snapshot = disk.path / "snapshot"
        wait(lambda: snapshot.exists() and b"made/empty" in snapshot.read_bytes())
        assert (shown / "d" / "b").read_bytes() == value
        begun = open(shown / "made" / "begun", "wb")  # noqa: SIM115 nothing is written to it before the disk goes
        with open(shown / "d" / "a", "rb", buffering=0) as opened:
            disk.unmount()
            wait(lambda: status(socket) == ("failing", AWAY))
            time.sleep(0.5)
            assert status(socket) == ("failing", AWAY)
            assert not disk.is_free()
            assert opened.read() == value
        wait(lambda: status(socket) == ("failing", LET_GO))
        wait(disk.is_free)
        wait(lambda: not os.listdir(shown))
        for name in ("d", "d/b", "made", "made/empty"):
            wait(lambda name=name: not (shown / name).exists())
        with pytest.raises(OSError, match="Input/output error"):
            (shown / "new").touch()
        with pytest.raises(OSError, match="Input/output error"):
            (shown / "new").mkdir()
        with pytest.raises(OSError, match="Input/output error"):
            os.write(begun.fileno(), b"x")
        begun.close()
        assert read(client, "d/a", there) == b""
        (tmp_path / "mnt" / "new").write_bytes(b"on the other one")
        disk.mount()
        wait(lambda: status(socket) == ("ready", ""))
        assert sorted(os.listdir(shown)) == ["d", "made"]
        assert (shown / "d" / "a").read_bytes() == (shown / "d" / "b").read_bytes() == value
        assert (shown / "made").stat().st_mode & 0o777 == 0o711
        assert (shown / "made" / "empty").stat().st_size == 0
        (shown / "d" / "new").write_bytes(b"new")
        assert read(client, "d/new", there) == b"new"
        log = daemon.stop()
        assert daemon.process.returncode == 0
        assert "Traceback" not in log, log
    disk.unmount()
    assert disk.is_free()
