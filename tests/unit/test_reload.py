"""A configuration that is read again: what changes at once, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import trio
import trio.testing

from kvcsfs.config import Permissions, Place
from kvcsfs.engine.engine import Engine
from kvcsfs.engine.room import Room
from kvcsfs.errors import ConfigError
from tests.stores import VALUE, bytes_on_disk, config, keys, put, running


def resized(settings, capacity):
    (mountpoint,) = settings.mountpoints
    return dataclasses.replace(
        settings, mountpoints=(dataclasses.replace(mountpoint, capacity=capacity, high_watermark=0.25),)
    )


async def test_a_smaller_capacity_evicts_the_oldest_at_once(tmp_path):
    settings = config(tmp_path)
    async with running(settings) as engine:
        session = engine.session(0)
        for i in range(16):
            assert await put(engine, session, f"k{i:02}", b"x" * VALUE) is None
        engine.reload(resized(settings, 2 << 20))
        with trio.fail_after(5):
            while engine.status()["mountpoints"][0]["used_bytes"] > 1.5 * (1 << 20):
                await trio.sleep(0.001)
        assert bytes_on_disk(tmp_path / "data0") <= 1.5 * (1 << 20)
        assert await keys(engine) == [f"k{i:02}" for i in range(10, 16)], "a quarter is kept free"
        assert (await engine.space(0))[0] == 2 << 20
        assert await put(engine, session, "new", b"x" * VALUE) is None


async def test_free_slots_leave_with_the_capacity(tmp_path):
    settings = config(tmp_path, capacity=64 << 20)
    async with running(settings) as engine:
        session = engine.session(0)
        for i in range(8):
            assert await put(engine, session, f"k{i}", b"x" * VALUE) is None
        await engine.remove_prefix(0, "k")
        assert engine.status()["mountpoints"][0]["free_slot_bytes"] == 8 * (256 << 10)
        engine.reload(resized(settings, 1 << 20))
        with trio.fail_after(5):
            while bytes_on_disk(tmp_path / "data0") > 1 << 20:
                await trio.sleep(0.001)


async def test_a_smaller_capacity_in_the_last_moment_of_a_recovery(tmp_path, monkeypatch):
    settings = config(tmp_path)
    async with running(settings) as engine:
        session = engine.session(0)
        for i in range(16):
            assert await put(engine, session, f"k{i:02}", b"x" * VALUE) is None
    engine = Engine(settings)
    clear = Room.clear

    async def cleared(room: Room, goal: float) -> None:
        await clear(room, goal)
        monkeypatch.setattr(Room, "clear", clear)
        engine.reload(resized(settings, 2 << 20))
        await trio.testing.wait_all_tasks_blocked()  # as it waits for free slots that are dropped

    monkeypatch.setattr(Room, "clear", cleared)
    async with engine.running():
        with trio.fail_after(5):
            while engine.volumes[0].recovering or engine.status()["mountpoints"][0]["used_bytes"] > 2 << 20:
                await trio.sleep(0.001)


async def test_a_larger_capacity_has_room_at_once(tmp_path):
    settings = config(tmp_path)
    async with running(settings) as engine:
        session = engine.session(0)
        engine.reload(resized(settings, 8 << 20))
        for i in range(30):
            assert await put(engine, session, f"k{i:02}", b"x" * VALUE) is None
        assert len(await keys(engine)) == 30


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c, path: dataclasses.replace(c, socket=path), "store.socket"),
        (lambda c, path: dataclasses.replace(c, mount=path), "store.mount"),
        (lambda c, path: dataclasses.replace(c, backend="pooled"), "store.backend"),
        (lambda c, path: dataclasses.replace(c, permissions=(Permissions("a", 1),)), "[[prefixes]]"),
        (lambda c, path: dataclasses.replace(c, places=(Place(path),)), "[[mounts]]"),
        (lambda c, path: dataclasses.replace(c, mountpoints=c.mountpoints * 2), "[[mountpoints]]"),
        (
            lambda c, path: dataclasses.replace(
                c, mountpoints=(dataclasses.replace(c.mountpoints[0], io="direct", capacity=1 << 20),)
            ),
            "[[mountpoints]]",
        ),
    ],
)
async def test_what_needs_a_restart_is_named_and_nothing_changes(tmp_path, change, named):
    settings = config(tmp_path)
    async with running(settings) as engine:
        with pytest.raises(ConfigError, match="can't change without a restart") as caught:
            engine.reload(change(settings, tmp_path / "other"))
        assert named in str(caught.value)
        assert engine.config is settings
        assert (await engine.space(0))[0] == 4 << 20
