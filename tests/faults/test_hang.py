"""A backing file system that stops answering: it fails alone, everything else goes on, and it comes back by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from kvcsfs.config import Config, MountpointConfig
from kvcsfs.engine import lane
from kvcsfs.engine.engine import Engine
from kvcsfs.engine.session import Staged
from kvcsfs.errors import BackingError
from tests.daemons import Daemon, store_file
from tests.faults.hangfs import HangFs
from tests.needs import needs_fuse
from tests.rawclient import RawClient
from tests.stores import bytes_on_disk, checksum, get, put, reserve, write

pytestmark = [
    pytest.mark.fault,
    pytest.mark.mount,
    needs_fuse,
]

HUNG = 1  # the mountpoint that hangs; 0 is on a file system that answers
LIMIT = 5.0  # in which everything must have ended here: the patience below is six tenths of a second
VALUE = b"x" * 5000


@pytest.fixture
def backing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HangFs]:
    monkeypatch.setattr(lane, "LATE_SECONDS", 0.2)
    monkeypatch.setattr(lane, "PROBE_SECONDS", 0.4)
    monkeypatch.setattr(lane, "LOOK_SECONDS", 0.02)
    with HangFs(tmp_path / "hanging") as served:
        yield served


@asynccontextmanager
async def two(tmp_path: Path) -> AsyncIterator[Engine]:
    """An engine with one mountpoint that answers and one that can hang."""
    (tmp_path / "local").mkdir()
    points = tuple(MountpointConfig(tmp_path / n, 64 << 20, 0.0, 0.0) for n in ("local", "hanging"))
    engine = Engine(Config(points, tmp_path / "sock", backend="pooled"))
    async with engine.running():
        await engine.volumes.recovered()
        yield engine


def state(engine: Engine) -> str:
    return str(engine.status()["mountpoints"][HUNG]["state"])


async def until(engine: Engine, wanted: str) -> None:
    with trio.fail_after(LIMIT):
        while state(engine) != wanted:
            await trio.sleep(0.005)


async def settled(engine: Engine) -> None:
    """Wait until every step has booked what it did, and compare the books with the files."""
    volume = engine.volumes[HUNG]
    with trio.fail_after(LIMIT):
        while volume.lane._steps or any(not e.pins for e in volume.catalog.retired):
            await trio.sleep(0.005)
    engine.check()
    assert await trio.to_thread.run_sync(bytes_on_disk, volume.config.path) == volume.catalog.ledger.used


async def test_what_waits_fails_and_the_other_mountpoint_goes_on(tmp_path, backing, expected_warnings):
    expected_warnings.append("doesn't answer")
    async with two(tmp_path) as engine:
        session = engine.session(0)
        assert await put(engine, session, "k", VALUE) is None
        for key in ("got", "deleted", "verified", "evicted", "k"):
            assert await put(engine, session, key, VALUE, HUNG) is None
        staged = await reserve(engine, session, "new", 5000, HUNG)
        await trio.to_thread.run_sync(write, staged, VALUE)
        backing.hang()
        failed: list[str] = []

        async def fails(name: str, call, *args) -> None:
            with pytest.raises(BackingError, match="doesn't answer"):
                await call(*args)
            failed.append(name)

        with trio.fail_after(LIMIT):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fails, "get", get, engine, session, "got", HUNG)
                nursery.start_soon(fails, "reserve", engine.reserve_many, session, HUNG, ["a"], [5000])
                nursery.start_soon(fails, "delete", engine.delete_many, HUNG, ["deleted"])
                nursery.start_soon(fails, "verify", engine.verify_many, HUNG, ["verified"])
                nursery.start_soon(fails, "evict", engine.evict, HUNG, "evicted", 0)
                nursery.start_soon(fails, "stage", engine.stage_file, session, HUNG, "f")
                for i in range(50):
                    assert await put(engine, session, f"k{i}", VALUE) is None
                    assert await get(engine, session, "k") == VALUE
        assert len(failed) == 6
        assert state(engine) == "hung"
        (outcome,) = await engine.commit_many(session, [staged.token], [checksum(VALUE)])
        assert isinstance(outcome, BackingError)
        backing.go()
        await until(engine, "ready")
        await settled(engine)
        assert engine.status()["reservations"] == 0
        assert await put(engine, session, "k", VALUE, HUNG) is None
        assert await get(engine, session, "k", HUNG) == VALUE


async def test_who_misses_a_key_that_leaves_waits_no_longer_than_the_others(
    tmp_path, backing, expected_warnings
):
    expected_warnings.append("doesn't answer")
    async with two(tmp_path) as engine:
        session = engine.session(0)
        assert await put(engine, session, "k", VALUE, HUNG) is None
        backing.hang()

        async def evict() -> None:
            with pytest.raises(BackingError):
                await engine.evict(HUNG, "k", 0)

        with trio.fail_after(LIMIT):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(evict)
                while await engine.find(HUNG, "k") is not None:
                    await trio.sleep(0.005)
                for _ in range(2):  # before it is known to hang, and then
                    with pytest.raises(BackingError):
                        await get(engine, session, "k", HUNG)
        backing.go()
        await until(engine, "ready")
        await settled(engine)
        assert await get(engine, session, "k", HUNG) is None


async def test_while_it_hangs_nothing_is_begun(tmp_path, backing, expected_warnings):
    expected_warnings.append("doesn't answer")
    async with two(tmp_path) as engine:
        session = engine.session(0)
        assert await put(engine, session, "k", VALUE, HUNG) is None
        backing.hang()
        with pytest.raises(BackingError):
            await engine.reserve_many(session, HUNG, ["a"], [5000])
        under_way = len(engine.volumes[HUNG].lane._out)
        for _ in range(100):
            for call in (
                engine.reserve_many(session, HUNG, ["a"], [5000]),
                engine.open_many(session, HUNG, ["k"]),
                engine.query_many(HUNG, ["k"]),
                engine.delete_many(HUNG, ["k"]),
            ):
                with pytest.raises(BackingError):
                    await call
        assert (await engine.query_many(HUNG, ["absent"])) == [None]
        assert len(engine.volumes[HUNG].lane._out) == under_way
        backing.go()
        await until(engine, "ready")
        await settled(engine)
        assert await get(engine, session, "k", HUNG) == VALUE


async def test_a_commit_that_hung_completes_when_it_can(tmp_path, backing, expected_warnings):
    expected_warnings.append("doesn't answer")
    async with two(tmp_path) as engine:
        session = engine.session(0)
        staged = await reserve(engine, session, "k", 5000, HUNG)
        await trio.to_thread.run_sync(write, staged, VALUE)
        backing.hang()
        (outcome,) = await engine.commit_many(session, [staged.token], [checksum(VALUE)])
        assert isinstance(outcome, BackingError)
        assert engine.volumes[HUNG].catalog.ledger.reserved == staged.charged, "counted until it is known"
        backing.go()
        await until(engine, "ready")
        await settled(engine)
        assert await get(engine, session, "k", HUNG) == VALUE


async def test_a_session_ends_at_once_and_what_it_held_later(tmp_path, backing, expected_warnings):
    expected_warnings.append("doesn't answer")
    async with two(tmp_path) as engine:
        session = engine.session(0)
        assert await put(engine, session, "k", VALUE, HUNG) is None
        await engine.open_many(session, HUNG, ["k"])
        staged = [await reserve(engine, session, f"s{i}", 5000, HUNG) for i in range(20)]
        await trio.to_thread.run_sync(lambda: [os.close(s.fd) for s in staged])
        grown = await engine.stage_file(session, HUNG, "grown")
        await engine.grow(session, grown, 100_000)
        backing.hang()
        with trio.fail_after(LIMIT):
            await engine.close_session(session)
        backing.go()
        await until(engine, "ready")
        await settled(engine)
        assert engine.volumes[HUNG].catalog.ledger.reserved == 0


async def test_all_threads_taken_is_an_answer_too(tmp_path, backing, monkeypatch):
    """One bad file and a server that otherwise answers: the breaker stays shut, but nobody waits for a thread."""
    monkeypatch.setattr(lane, "PROBE_SECONDS", 5.0)  # the machine may be busy
    async with two(tmp_path) as engine:
        volume, session = engine.volumes[HUNG], engine.session(0)
        assert await put(engine, session, "open", VALUE, HUNG) is None
        assert await get(engine, session, "open", HUNG) == VALUE
        go = trio.Event()

        def wait() -> None:
            trio.from_thread.run(go.wait)

        async with trio.open_nursery() as nursery:
            for _ in range(lane.THREADS):
                nursery.start_soon(engine.work, HUNG, wait)
            with trio.fail_after(LIMIT):
                while not volume.lane._out_is_late():
                    await trio.sleep(0.005)
            with pytest.raises(BackingError):
                await engine.reserve_many(session, HUNG, ["a"], [5000])
            assert engine.open_ready(session, HUNG, ["open"]) is None, "whoever read it might wait"
            with pytest.raises(BackingError):
                await engine.open_many(session, HUNG, ["open"])
            while volume.lane._asked is None or volume.lane._probe_limiter.borrowed_tokens:
                await trio.sleep(0.005)
            assert state(engine) == "ready"
            go.set()
        assert await put(engine, session, "k", VALUE, HUNG) is None


async def test_a_stop_is_bounded(tmp_path, backing, expected_warnings):
    expected_warnings.append("doesn't answer")
    async with two(tmp_path) as engine:
        session = engine.session(0)
        for index in (0, HUNG):
            assert await put(engine, session, "k", VALUE, index) is None
        (staged,) = await engine.reserve_many(session, HUNG, ["s"], [5000])
        assert isinstance(staged, Staged)
        backing.hang()
        begun = time.monotonic()
    assert time.monotonic() - begun < LIMIT
    assert (tmp_path / "local" / "snapshot").exists(), "the other mountpoint stopped cleanly"
    backing.go()


async def test_a_stop_in_the_middle_of_a_hang_is_bounded(tmp_path, backing, expected_warnings):
    expected_warnings.append("doesn't answer")
    async with two(tmp_path) as engine:
        session = engine.session(0)
        assert await put(engine, session, "k", VALUE, HUNG) is None
        backing.hang()
        with pytest.raises(BackingError):
            await engine.delete_many(HUNG, ["k"])
        begun = time.monotonic()
    assert time.monotonic() - begun < LIMIT
    backing.go()


async def test_a_stop_while_background_work_hangs_is_bounded(tmp_path, backing, expected_warnings):
    expected_warnings.append("doesn't answer")
    async with two(tmp_path) as engine:
        session = engine.session(0)
        assert await put(engine, session, "k", VALUE, HUNG) is None
        opened = await engine.open_many(session, HUNG, ["k"])
        await engine.delete_many(HUNG, ["k"])
        backing.hang()
        engine.release(session, opened.lease)  # its slot is reclaimed in the background
        while not engine.volumes[HUNG].lane._out:
            await trio.sleep(0.001)
        begun = time.monotonic()
    assert time.monotonic() - begun < LIMIT
    backing.go()


PATIENCE = """
from kvcsfs.engine import lane
lane.LATE_SECONDS = lane.PROBE_SECONDS = 0.3
lane.LOOK_SECONDS = 0.05
"""


def test_the_other_faces_answer_and_the_daemon_stops(tmp_path, backing):
    (tmp_path / "local").mkdir()
    mount = tmp_path / "mnt"
    file = store_file(tmp_path, tmp_path / "local", tmp_path / "hanging", mount=True)
    other = mount / ".mountpoints" / "1"
    with Daemon(file, PATIENCE) as daemon:
        (mount / "k").write_bytes(VALUE)
        for i in range(120):
            (other / f"k{i}").write_bytes(VALUE)
        with RawClient(tmp_path / "sock") as client:
            while (
                client.status()["mountpoints"][HUNG]["entries"] < 120
            ):  # close returns before its release arrives
                time.sleep(0.01)
        backing.hang()
        readers = [subprocess.Popen(["cat", other / f"k{i}"], stderr=subprocess.PIPE) for i in range(120)]
        begun = time.monotonic()
        assert (mount / "k").read_bytes() == VALUE
        (mount / "new").write_bytes(VALUE)
        with RawClient(tmp_path / "sock") as client:
            assert client.get("k") == VALUE
            assert client.put("k2", VALUE) == 0
            while client.status()["mountpoints"][HUNG]["state"] != "hung":
                assert time.monotonic() - begun < LIMIT
        for reader in readers:
            assert b"Input/output error" in reader.communicate(timeout=LIMIT)[1]
        log = daemon.stop()
        assert daemon.process.returncode == 0
        assert "no snapshot: the backing file system doesn't answer" in log
    assert time.monotonic() - begun < 10
    assert f" {mount} " not in Path("/proc/self/mounts").read_text()
    backing.go()
    with Daemon(file) as daemon:
        assert (mount / "new").read_bytes() == VALUE
        assert (other / "k7").read_bytes() == VALUE
        daemon.stop()


def test_a_reload_does_not_wait_for_a_directory_that_hangs(tmp_path, backing):
    (tmp_path / "local").mkdir()
    file = store_file(tmp_path, tmp_path / "local", tmp_path / "hanging")
    with Daemon(file, PATIENCE + "from kvcsfs import daemon; daemon.RELOAD_SECONDS = 0.3\n") as daemon:
        backing.hang()
        daemon.process.send_signal(signal.SIGHUP)
        assert daemon.process.stderr is not None
        while "not reloaded: a backing directory doesn't answer" not in (
            line := daemon.process.stderr.readline()
        ):
            assert line, "it ended"
        with RawClient(tmp_path / "sock") as client:
            assert client.put("k", VALUE) == 0
        daemon.stop()
        assert daemon.process.returncode == 0
    backing.go()


LOOP_STANDS_STILL = """
import time
from kvcsfs import daemon
from kvcsfs.batch import face
daemon.STILL_SECONDS = 1.0
face.BatchFace.stop = lambda self: time.sleep(60)
"""


def test_a_stop_ends_even_if_the_loop_stands_still(tmp_path):
    (tmp_path / "local").mkdir()
    with Daemon(store_file(tmp_path, tmp_path / "local"), LOOP_STANDS_STILL) as daemon:
        with RawClient(tmp_path / "sock") as client:
            assert client.put("k", VALUE) == 0
        begun = time.monotonic()
        assert "ending anyway" in daemon.stop()
        assert daemon.process.returncode == 1
        assert time.monotonic() - begun < 15
    with Daemon(store_file(tmp_path, tmp_path / "local")) as daemon:
        with RawClient(tmp_path / "sock") as client:
            assert client.get("k") == VALUE
        daemon.stop()
