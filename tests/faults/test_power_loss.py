"""What a power loss leaves: built by hand, and by the image of a mounted file system as it is at that moment."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from kvcsfs.config import Config, MountpointConfig
from kvcsfs.engine import footer, recovery
from kvcsfs.engine.engine import Engine
from kvcsfs.engine.entry import BLOCK, Entry
from kvcsfs.engine.session import Session
from tests.faces.mounted import Mounted
from tests.faults.loop import copy_as_after_power_loss, make_image, mounted
from tests.needs import needs_root
from tests.stores import bytes_on_disk, checksum, config, get, path_of, put, reserve, running, slot_files
from tests.unit.test_footer import block

pytestmark = pytest.mark.fault

OLD, NEW = b"old value " * 900, b"new value " * 900  # of one size: one slot serves both


@pytest.fixture
def another_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "boot_id", lambda: "another boot")


# -- images made by hand: each damages the object of "k" in its own way


def rewrite(path: Path, data: bytes, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def replaced(entry: Entry, value: bytes, key: str = "k") -> bytes:
    """The footer that the slot had before, or was to get."""
    return footer.pack(key, len(value), entry.generation - 1, 1000.0, checksum(value))


def torn(entry: Entry, path: Path) -> None:
    rewrite(path, replaced(entry, OLD)[: BLOCK // 2], path.stat().st_size - BLOCK)


def old_footer(entry: Entry, path: Path) -> None:
    rewrite(path, replaced(entry, OLD), path.stat().st_size - BLOCK)


def another_key(entry: Entry, path: Path) -> None:
    rewrite(path, replaced(entry, OLD, "other"), path.stat().st_size - BLOCK)


IMAGES: dict[str, Callable[[Entry, Path], None]] = {
    "cut to nothing": lambda entry, path: os.truncate(path, 0),
    "cut in the value": lambda entry, path: os.truncate(path, BLOCK),
    "cut before the footer": lambda entry, path: os.truncate(path, path.stat().st_size - BLOCK),
    "cut in the footer": lambda entry, path: os.truncate(path, path.stat().st_size - 1),
    "longer than its footer says": lambda entry, path: os.truncate(path, path.stat().st_size + BLOCK),
    "all zeros": lambda entry, path: rewrite(path, bytes(path.stat().st_size), 0),
    "data of zeros": lambda entry, path: rewrite(path, bytes(len(NEW)), 0),
    "one block of zeros": lambda entry, path: rewrite(path, bytes(BLOCK), BLOCK),
    "old data under the new footer": lambda entry, path: rewrite(path, OLD, 0),
    "new data under the old footer": old_footer,
    "new data under the footer of an evicted key": another_key,
    "a torn footer": torn,
    "a footer of zeros": lambda entry, path: rewrite(path, bytes(BLOCK), path.stat().st_size - BLOCK),
    "no file": lambda entry, path: path.unlink(),
}


async def crashed_store(path: Path, image: Callable[[Entry, Path], None]) -> Config:
    """A store after a power loss: "good" is whole, "k" is what `image` made of it."""
    settings = config(path)
    data = settings.mountpoints[0].path
    async with running(settings) as engine:
        session = engine.session(0)
        assert await put(engine, session, "good", OLD) is None
        assert await put(engine, session, "k", NEW) is None
        entry = engine.volumes[0].catalog.index.get("k")
    (data / "snapshot").unlink()
    image(entry, path_of(data, entry.slot))
    return settings


async def every_value(engine: Engine, session: Session) -> dict[str, bytes]:
    """What a face that can't verify serves."""
    names = ["good", "k", "other"]
    opened = await engine.open_many(session, 0, names, temporaries=True, verify=True)
    hits = [e for e in opened.entries if e is not None]
    values = {e.key: os.pread(fd, e.size, 0) for e, fd in zip(hits, opened.fds, strict=True)}
    engine.release(session, opened.lease)
    return values


@pytest.mark.parametrize("image", IMAGES)
async def test_nothing_wrong_is_served_without_a_look(image, tmp_path, expected_warnings):
    expected_warnings.append("dropped 1 entries with a wrong checksum")
    settings = await crashed_store(tmp_path, IMAGES[image])
    async with running(settings) as engine:
        assert not any(e.proven for e in await engine.page(0, "", "", 9))
        assert await every_value(engine, engine.session(0)) == {"good": OLD}
        ledger = engine.volumes[0].catalog.ledger
        assert ledger.used == bytes_on_disk(settings.mountpoints[0].path)
        assert ledger.committed == 4 * BLOCK


@pytest.mark.parametrize("image", IMAGES)
async def test_the_scrub_finds_it(image, tmp_path, expected_warnings):
    expected_warnings.append("dropped 1 entries with a wrong checksum")
    settings = await crashed_store(tmp_path, IMAGES[image])
    point = dataclasses.replace(settings.mountpoints[0], scrub_rate=1 << 30)
    async with running(dataclasses.replace(settings, mountpoints=(point,))) as engine:
        scrub = engine.volumes[0].scrub
        with trio.fail_after(5):
            while scrub.done_bytes < scrub.total_bytes:
                await trio.sleep(0.005)
        assert [(e.key, e.proven) for e in await engine.page(0, "", "", 9)] == [("good", True)]


async def test_a_clean_stop_proves_nothing_after_a_power_loss(tmp_path, another_boot, expected_warnings):
    expected_warnings.append("dropped 1 entries with a wrong checksum")
    settings = config(tmp_path)
    async with running(settings) as engine:
        assert await put(engine, engine.session(0), "k", NEW) is None
    (slot,) = slot_files(settings.mountpoints[0].path)
    rewrite(slot, OLD, 0)
    async with running(settings) as engine:
        assert await every_value(engine, engine.session(0)) == {}


async def test_of_two_objects_the_lower_generation_never_wins(tmp_path, expected_warnings):
    """The newer one's data did not reach the disk: nothing is served, not what it had replaced."""
    expected_warnings.append("dropped 1 entries with a wrong checksum")
    settings = await crashed_store(tmp_path, lambda entry, path: rewrite(path, bytes(len(NEW)), 0))
    data = settings.mountpoints[0].path
    entry = next(f for f in map(Path.read_bytes, slot_files(data)) if f.startswith(bytes(len(NEW))))
    older = footer.pack("k", len(OLD), 1, 1000.0, checksum(OLD))
    path_of(data, 0x700).write_bytes(OLD.ljust(len(entry) - BLOCK, b"\0") + older)
    async with running(settings) as engine:
        assert await every_value(engine, engine.session(0)) == {"good": OLD}
    assert not path_of(data, 0x700).exists()


async def test_what_is_not_ours_or_newer_stays(tmp_path, expected_warnings):
    expected_warnings.append("left alone: footer of format 2")
    settings = await crashed_store(tmp_path, lambda entry, path: None)
    data = settings.mountpoints[0].path
    newer, foreign = path_of(data, 0x700), data / "slots" / "00" / "notes.txt"
    newer.write_bytes(bytes(BLOCK) + block(version=2))
    foreign.write_text("?")
    async with running(settings) as engine:
        assert await every_value(engine, engine.session(0)) == {"good": OLD, "k": NEW}
    assert newer.exists() and foreign.exists()


async def test_a_lost_epoch_gives_no_number_twice(tmp_path):
    """Without the directory `epoch` slots and generations go on after the highest that is there."""
    settings = await crashed_store(tmp_path, lambda entry, path: None)
    data = settings.mountpoints[0].path
    for _ in range(3):
        async with running(settings):
            pass
    (data / "snapshot").unlink()
    slots = {p.name for p in slot_files(data)}
    shutil.rmtree(data / "epoch")
    async with running(settings) as engine:
        session = engine.session(0)
        for i in range(20):
            assert await put(engine, session, f"more/{i}", NEW) is None
        assert await put(engine, session, "k", OLD) is None
        entry = engine.volumes[0].catalog.index.get("k")
        shutil.copytree(data, tmp_path / "copy")
    assert slots <= {p.name for p in slot_files(tmp_path / "copy")} | {entry.slot}


async def test_the_scrub_keeps_to_its_rate(tmp_path, autojump_clock):
    settings = config(tmp_path, capacity=64 << 20)
    async with running(settings) as engine:
        for i in range(10):
            assert await put(engine, engine.session(0), f"k{i}", os.urandom(1 << 20)) is None
    (settings.mountpoints[0].path / "snapshot").unlink()
    point = dataclasses.replace(settings.mountpoints[0], scrub_rate=1 << 20)
    begun = trio.current_time()
    async with running(dataclasses.replace(settings, mountpoints=(point,))) as engine:
        assert engine.status()["mountpoints"][0]["scrub_total_bytes"] == 10 << 20
        while engine.volumes[0].scrub.done_bytes < 10 << 20:
            await trio.sleep(0.1)
        assert trio.current_time() - begun >= 8  # 8 MiB before the second batch


@pytest.mark.mount
def test_the_mount_serves_no_wrong_byte(tmp_path):
    data = tmp_path / "data"
    with Mounted(data, tmp_path / "mnt") as store:
        store.put("m/k", NEW)
        store.kill()
        (slot,) = slot_files(data / "0")
        rewrite(slot, OLD, 0)
        store.start()
        with pytest.raises(FileNotFoundError):
            (tmp_path / "mnt" / "m" / "k").read_bytes()
        assert "dropped 1 entries with a wrong checksum" in store.stop()


# -- a real file system, as the disk has it at the moment of the loss


@needs_root
@pytest.mark.parametrize("durability", ["fsync", "none"])
async def test_power_loss_of_ext4(durability, tmp_path, another_boot, expected_warnings):
    """Every put that was answered is there with fsync, and every delete; without, nothing wrong is served."""
    expected_warnings.append("entries with a wrong checksum|not used, the footers are read")
    images = [tmp_path / f"{n}.img" for n in range(6)]
    make_image(images[0], 64 << 20)
    capacity = 2 << 20  # so small that slots are used again and again
    versions: list[dict[str, set[bytes | None]]] = []
    with mounted(images[0], tmp_path / "live") as live:
        point = MountpointConfig(live, capacity, 0.0, 0.0, durability=durability, scrub_rate=0)
        async with running(Config((point,))) as engine:
            session = engine.session(0)
            for turn, image in enumerate(images[1:]):
                versions.append(await change(engine, session, turn))
                copy_as_after_power_loss(images[0], image)
            staged = await reserve(engine, session, "unfinished", 5000)
            os.close(staged.fd)
    for image, expected in zip(images[1:], versions, strict=True):
        with mounted(image, tmp_path / "after") as after:
            async with running(Config((dataclasses.replace(point, path=after),))) as engine:
                session = engine.session(0)
                assert engine.volumes[0].catalog.ledger.used == bytes_on_disk(after)
                for entry in await engine.page(0, "", "", 10_000):
                    opened = await engine.open_many(session, 0, [entry.key], verify=True)
                    if opened.fds:
                        assert checksum(os.pread(opened.fds[0], entry.size, 0)) == entry.checksum
                    engine.release(session, opened.lease)
                for key, allowed in expected.items() if durability == "fsync" else ():
                    assert await get(engine, session, key) in allowed, key


async def change(engine: Engine, session: Session, turn: int) -> dict[str, set[bytes | None]]:
    """Puts, replacements, a rename and deletes, then as many puts as evict others; how the keys stand."""
    allowed: dict[str, set[bytes | None]] = {}
    for i in range(12):
        value = os.urandom(9000 + 4096 * (i % 3))
        assert await put(engine, session, f"k/{i}", value) is None
        allowed[f"k/{i}"] = {value}
    assert await engine.delete_many(0, ["k/3", "k/4"]) == [None, None]
    allowed["k/3"] = allowed["k/4"] = {None}
    await engine.rename(0, "k/5", "k/6")
    allowed["k/5"], allowed["k/6"] = {None}, allowed["k/5"]
    for i in range(100):
        assert await put(engine, session, f"filler/{turn}/{i}", os.urandom(9000)) is None
    return {k: v | {None} if await engine.find(0, k) is None else v for k, v in allowed.items()}
