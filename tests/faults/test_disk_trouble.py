"""Trouble of a real file system: full, out of inodes, failing, read-only, unmounted, replaced; and its end."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from kvcsfs.config import Config, MountpointConfig
from kvcsfs.engine import upkeep
from kvcsfs.engine.engine import Engine
from kvcsfs.errors import BackingError, CapacityError
from tests.faults.loop import make_image, mounted
from tests.needs import needs_root
from tests.stores import bytes_on_disk, config, get, keys, path_of, put, running, slot_files

pytestmark = [pytest.mark.fault, needs_root]

VALUE = b"value " * 20_000
_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN: from now on the file system fails, as when its disk is gone


@pytest.fixture
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "LOOK_SECONDS", 0.02)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 16 MiB."""
    make_image(tmp_path / "disk.img", 16 << 20)
    with mounted(tmp_path / "disk.img", tmp_path / "disk") as path:
        yield path


def beside(tmp_path: Path, disk: Path) -> Config:
    """Mountpoint 0 is sound, mountpoint 1 is on the disk."""
    (tmp_path / "sound").mkdir()
    points = [MountpointConfig(p, 1 << 30, 0.0, 0.0, scrub_rate=0) for p in (tmp_path / "sound", disk)]
    return Config(tuple(points), tmp_path / "sock", backend="pooled")


def state(engine: Engine, index: int) -> tuple[str, str]:
    status = engine.status()["mountpoints"][index]
    return status["state"], status["trouble"]


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


async def refused(engine: Engine, key: str) -> bool:
    """Whether a put on mountpoint 1 fails by its disk, found in the middle or known before."""
    try:
        return isinstance(await put(engine, engine.session(0), key, VALUE, 1), BackingError)
    except BackingError:
        return True


async def until(true: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not true():
            await trio.sleep(0.01)


def fill(path: Path) -> None:
    """Somebody else takes all the room there is."""
    with open(path, "wb", buffering=0) as file:
        size = 1 << 20
        while size >= 512:
            try:
                file.write(bytes(size))
                os.fsync(file.fileno())
            except OSError:
                size //= 2


async def test_somebody_else_fills_the_disk(tmp_path, disk, look_often, expected_warnings):
    expected_warnings.append("in trouble: No space left on device")
    async with running(beside(tmp_path, disk)) as engine:
        session = engine.session(0)
        for i in range(20):
            assert await put(engine, session, f"k{i:02}", VALUE, 1) is None
        fill(disk / "others")
        for i in range(20, 60):  # the room of evicted values is used again
            assert await put(engine, session, f"k{i:02}", VALUE, 1) is None
        assert 10 <= len(await keys(engine, 1)) <= 20
        assert await get(engine, session, "k59", 1) == VALUE
        failed = await put(engine, session, "large", VALUE * 60, 1)
        assert isinstance(failed, CapacityError), "more than there is, whatever is evicted"
        assert await put(engine, session, "large", VALUE * 60, 0) is None
        (disk / "others").unlink()
        assert await put(engine, session, "large", VALUE * 60, 1) is None
        await until(lambda: state(engine, 1) == ("ready", ""))
        assert engine.volumes[1].catalog.ledger.used == bytes_on_disk(disk)


async def test_a_growing_file_on_a_full_disk(tmp_path, disk):
    async with running(beside(tmp_path, disk)) as engine:
        session = engine.session(0)
        for i in range(20):
            assert await put(engine, session, f"k{i:02}", VALUE, 1) is None
        fill(disk / "others")
        staged = await engine.stage_file(session, 1, "file")
        await engine.grow(session, staged, len(VALUE))
        os.pwrite(staged.fd, VALUE, 0)
        with pytest.raises(CapacityError):
            await engine.grow(session, staged, 60 * len(VALUE))
        await engine.commit_file(session, staged, "file", len(VALUE), None)
        assert await get(engine, session, "file", 1) == VALUE
        assert engine.volumes[1].catalog.ledger.used == bytes_on_disk(disk)


async def test_no_inodes_left(tmp_path):
    make_image(tmp_path / "disk.img", 64 << 20, "-N", "320")
    with mounted(tmp_path / "disk.img", tmp_path / "disk") as disk:
        async with running(beside(tmp_path, disk)) as engine:
            session = engine.session(0)
            for i in range(100):
                assert await put(engine, session, f"k{i:02}", bytes(1 + i * 4096), 1) is None
            assert 5 < len(await keys(engine, 1)) < 60
            assert engine.volumes[1].catalog.ledger.used == bytes_on_disk(disk)


async def test_a_disk_that_fails(tmp_path, disk, look_often, expected_warnings):
    expected_warnings += ["in trouble: (Input/output error|Read-only)", "no snapshot", "can't be voided"]
    async with running(beside(tmp_path, disk)) as engine:
        session = engine.session(0)
        for index in (0, 1):
            assert await put(engine, session, "k", VALUE, index) is None
        root = os.open(disk, os.O_RDONLY)
        fcntl.ioctl(root, _SHUTDOWN, struct.pack("I", 2))
        os.close(root)
        for i in range(3):
            assert await refused(engine, f"new{i}")
            assert await put(engine, session, f"new{i}", VALUE, 0) is None
        assert await get(engine, session, "k", 0) == VALUE
        await until(lambda: state(engine, 1)[0] == "failing")
        assert state(engine, 0) == ("ready", "")
        assert await refused(engine, "later"), "at once: nothing is evicted for it"
        assert engine.status()["mountpoints"][1]["entries"] == 1
        assert engine.status()["mountpoints"][1]["io_errors"] >= 1


async def test_a_delete_that_a_restart_would_undo_is_told(tmp_path, disk, expected_warnings):
    expected_warnings += ["no snapshot", "in trouble"]
    async with running(beside(tmp_path, disk)) as engine:
        session = engine.session(0)
        assert await put(engine, session, "k", VALUE, 1) is None
        root = os.open(disk, os.O_RDONLY)
        fcntl.ioctl(root, _SHUTDOWN, struct.pack("I", 2))
        os.close(root)
        (answer,) = await engine.delete_many(1, ["k"])
        assert isinstance(answer, BackingError)
        assert await get(engine, session, "k", 1) is None


async def test_a_disk_that_turns_read_only_and_back(
    tmp_path, disk, look_often, monkeypatch, expected_warnings
):
    """Reads go on. Descriptors open for writing keep the kernel from a remount: the errors are injected."""
    expected_warnings.append("in trouble: Read-only file system")
    real = os.open

    def read_only(path, flags, mode=0o777, *, dir_fd=None):
        if flags & (os.O_WRONLY | os.O_RDWR) and dir_fd in (store.directory.root, store.slots):
            raise OSError(30, "Read-only file system")
        return real(path, flags, mode, dir_fd=dir_fd)

    async with running(beside(tmp_path, disk)) as engine:
        session, store = engine.session(0), engine.volumes[1].store
        assert await put(engine, session, "k", VALUE, 1) is None
        monkeypatch.setattr(os, "open", read_only)
        assert await refused(engine, "new")
        assert await get(engine, session, "k", 1) == VALUE
        await until(lambda: state(engine, 1) == ("failing", "Read-only file system"))
        monkeypatch.setattr(os, "open", real)
        await until(lambda: state(engine, 1) == ("ready", ""))
        assert await put(engine, session, "new", VALUE, 1) is None


async def unmounted_and_replaced(
    engine: Engine, go: Callable[[], object], back: Callable[[], object]
) -> None:
    session = engine.session(0)
    assert await put(engine, session, "k", VALUE, 1) is None
    go()
    await until(lambda: state(engine, 1) == ("failing", "the backing directory was unmounted or replaced"))
    assert await get(engine, session, "k", 1) is None, "a miss"
    with pytest.raises(BackingError):
        await put(engine, session, "new", VALUE, 1)
    assert await put(engine, session, "new", VALUE, 0) is None
    await engine.volumes[1].upkeep.checkpoint()
    back()
    await until(lambda: state(engine, 1) == ("ready", ""))
    assert await get(engine, session, "k", 1) == VALUE
    assert await put(engine, session, "new", VALUE, 1) is None


async def test_the_file_system_is_unmounted_and_mounted_again(tmp_path, look_often, expected_warnings):
    expected_warnings.append("in trouble: the backing directory was unmounted or replaced")
    make_image(tmp_path / "disk.img", 16 << 20)
    device, disk = run("losetup", "-f", "--show", tmp_path / "disk.img"), tmp_path / "disk"
    disk.mkdir()

    def mount() -> None:
        run("mount", device, disk)

    def unmount() -> None:
        run("umount", "-l", disk)
        assert list(disk.iterdir()) == []

    mount()
    try:
        async with running(beside(tmp_path, disk)) as engine:
            await unmounted_and_replaced(engine, unmount, mount)
    finally:
        run("umount", disk)
        run("losetup", "-d", device)


async def test_the_directory_is_replaced_and_comes_back(tmp_path, look_often, expected_warnings):
    expected_warnings.append("in trouble: the backing directory was unmounted or replaced")
    disk, away = tmp_path / "disk", tmp_path / "away"
    disk.mkdir()

    def replace() -> None:
        disk.rename(away)
        disk.mkdir()

    def back() -> None:
        assert list(disk.iterdir()) == [], "nothing was written to what isn't ours"
        disk.rmdir()
        away.rename(disk)

    async with running(beside(tmp_path, disk)) as engine:
        await unmounted_and_replaced(engine, replace, back)


async def test_one_file_that_can_not_be_removed(tmp_path, expected_warnings):
    """An immutable file stays counted, and everything else goes on; it goes when it can."""
    settings = config(tmp_path, capacity=2 << 20)
    data = settings.mountpoints[0].path
    async with running(settings) as engine:
        session, ledger = engine.session(0), engine.volumes[0].catalog.ledger
        assert await put(engine, session, "stuck", b"x" * 70_000) is None
        entry = engine.volumes[0].catalog.index.get("stuck")
        path = path_of(data, entry.slot)
        try:
            run("chattr", "+i", path)
        except subprocess.CalledProcessError:
            pytest.skip("the file system of the temporary directory has no immutable files")
        try:
            for i in range(60):
                assert await put(engine, session, f"k{i:02}", b"x" * (50_000 + i)) is None
            assert path.exists()
            assert await get(engine, session, "stuck") is None
            assert ledger.used == bytes_on_disk(data) <= 2 << 20
            assert ledger.retired == entry.charged
        finally:
            run("chattr", "-i", path)
        engine.volumes[0].room.loose.set()
        await until(lambda: not ledger.retired)
        assert path not in slot_files(data) or ledger.used == bytes_on_disk(data)
