"""What the engine keeps through a stop and a start, and what it drops as wrong."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
import trio

from kvcsfs.engine import recovery
from kvcsfs.engine.engine import Engine
from kvcsfs.engine.entry import SOLE, Entry, charge
from kvcsfs.engine.session import Staged
from kvcsfs.errors import BusyError
from tests.stores import (
    CAPACITY,
    VALUE,
    bytes_on_disk,
    checksum,
    config,
    get,
    keys,
    ledger,
    path_of,
    put,
    reserve,
    running,
    settle,
    values,
    write,
)

# -- verification


async def test_a_wrong_value_is_dropped_and_counted(tmp_path, expected_warnings):
    expected_warnings.append("dropped 1 entries with a wrong checksum")
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        await put(engine, session, "good", b"g" * 5000)
        await put(engine, session, "bad", b"b" * 5000)
        (bad,) = await engine.query_many(0, ["bad"])
        assert isinstance(bad, Entry)
        fd = os.open(path_of(tmp_path / "data0", bad.slot), os.O_WRONLY)
        os.pwrite(fd, b"?", 0)
        os.close(fd)
        assert await engine.verify_many(0, ["good", "bad", "none", "bad"]) == [5000, 0, 0, 0]
        assert await keys(engine) == ["good"]
        assert engine.status()["mountpoints"][0]["checksum_errors"] == 1
        await settle(engine)
        assert ledger(engine).committed == charge(5000)


# -- stop and start


async def fill(engine: Engine) -> dict[str, bytes]:
    session = engine.session(0)
    contents = values([f"m/{i}" for i in range(5)])
    for key, value in contents.items():
        assert await put(engine, session, key, value) is None
    await get(engine, session, "m/2")
    await engine.delete_many(0, ["m/4"])
    del contents["m/4"]
    await engine.close_session(session)
    return contents


async def contents_of(engine: Engine) -> dict[str, bytes | None]:
    session = engine.session(0)
    return {key: await get(engine, session, key) for key in await keys(engine)}


async def test_a_clean_restart(tmp_path):
    settings = config(tmp_path)
    async with running(settings) as engine:
        contents = await fill(engine)
        order = [e.key for e in engine.volumes[0].catalog.victims()]
        used, free = ledger(engine).used, ledger(engine).free_slots
        engine.volumes[0].extras["modes"] = {"m": 1}
    assert free
    async with running(settings) as engine:
        assert [e.key for e in engine.volumes[0].catalog.victims()] == order
        assert (ledger(engine).used, ledger(engine).free_slots) == (used, free)
        assert all(e.proven for e in engine.volumes[0].catalog.index.entries())
        assert engine.volumes[0].extras == {"modes": {"m": 1}}
        assert await contents_of(engine) == contents
        assert await put(engine, engine.session(0), "again", b"a" * 5000) is None
        assert bytes_on_disk(tmp_path / "data0") == ledger(engine).used


async def test_the_order_within_a_batch_survives_a_restart(tmp_path):
    settings = config(tmp_path)
    async with running(settings) as engine:
        session = engine.session(0)
        names = ["a", "b", "c", "d"]
        staged = await engine.reserve_many(session, 0, names, [1] * 4)
        tokens = []
        for s in staged:
            assert isinstance(s, Staged)
            write(s, b"x")
            tokens.append(s.token)
        await engine.commit_many(session, tokens, [checksum(b"x")] * 4)
        assert [e.key for e in engine.volumes[0].catalog.victims()] == ["d", "c", "b", "a"]
    async with running(settings) as engine:
        assert [e.key for e in engine.volumes[0].catalog.victims()] == ["d", "c", "b", "a"]


async def test_after_an_unclean_stop_every_committed_value_is_there(tmp_path):
    settings = config(tmp_path)
    async with running(settings) as engine:
        contents = await fill(engine)
        session = engine.session(0)
        staged = await reserve(engine, session, "m/staged", 5000)
        os.pwrite(staged.fd, b"x" * 5000, 0)
        await engine.volumes[0].upkeep.checkpoint()
        contents |= values(["m/late"])
        await put(engine, session, "m/late", contents["m/late"])
        shutil.copytree(tmp_path / "data0", tmp_path / "crash" / "data0")
        os.close(staged.fd)
    async with running(config(tmp_path / "crash")) as engine:
        entries = list(engine.volumes[0].catalog.victims())
        assert not any(e.proven for e in entries)
        assert [e.key for e in entries] == ["m/0", "m/1", "m/3", "m/2", "m/late"], (
            "in the order of the checkpoint"
        )
        assert await contents_of(engine) == contents
        assert bytes_on_disk(tmp_path / "crash" / "data0") == ledger(engine).used
        assert await engine.verify_many(0, ["m/0"]) == [5000]
        (proven,) = await engine.query_many(0, ["m/0"])
        assert proven is not None
        assert proven.proven


async def test_a_checkpoint_that_is_asked_for_comes_soon_and_not_all_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr("kvcsfs.engine.volumes.ASKED_SECONDS", 0.01)
    monkeypatch.setattr("kvcsfs.engine.volumes.REST_SECONDS", 0.1)
    snapshot, times = tmp_path / "data0" / "snapshot", set()
    async with running(config(tmp_path)) as engine:
        began = trio.current_time()
        for _ in range(40):
            engine.save_soon(0)
            await trio.sleep(0.01)
            if snapshot.exists():
                times.add(snapshot.stat().st_mtime_ns)
        assert 1 <= len(times) <= 1 + (trio.current_time() - began) / 0.1


async def test_a_checkpoint_that_fails_is_not_tried_at_every_request(
    tmp_path, monkeypatch, expected_warnings, caplog
):
    monkeypatch.setattr("kvcsfs.engine.volumes.ASKED_SECONDS", 0.01)
    monkeypatch.setattr("kvcsfs.engine.volumes.REST_SECONDS", 0.01)

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    expected_warnings.append("no checkpoint: No space left on device")
    async with running(config(tmp_path)) as engine:
        with monkeypatch.context() as full:
            full.setattr(recovery.SnapshotWriter, "finish", no_room)
            for _ in range(40):
                engine.save_soon(0)
                await trio.sleep(0.01)
        assert caplog.text.count("no checkpoint") == 1


async def test_a_lower_capacity_evicts_the_oldest_at_the_start(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        for i in range(16):
            await put(engine, session, f"k{i:02}", b"x" * VALUE)
        await engine.delete_many(0, ["k15"])
    async with running(config(tmp_path, CAPACITY // 4)) as engine:
        assert await keys(engine) == ["k11", "k12", "k13", "k14"]
        assert bytes_on_disk(tmp_path / "data0") == ledger(engine).used <= CAPACITY // 4


async def test_while_it_recovers_the_store_misses_and_is_busy(tmp_path, monkeypatch):
    settings = config(tmp_path)
    async with running(settings) as engine:
        await put(engine, engine.session(0), "k", b"x")
    real, go = recovery.recover, trio.Event()

    def waiting(store, watch):
        trio.from_thread.run(go.wait)
        return real(store, watch)

    monkeypatch.setattr(recovery, "recover", waiting)
    engine = Engine(settings)
    async with engine.running():
        session = engine.session(0)
        assert await get(engine, session, "k") is None
        assert engine.status()["mountpoints"][0]["state"] == "recovering"
        with pytest.raises(BusyError):
            await engine.reserve_many(session, 0, ["n"], [1])
        with pytest.raises(BusyError):
            await engine.delete_many(0, ["k"])
        go.set()
        await engine.volumes.recovered()
        assert await get(engine, session, "k") == b"x"


async def test_no_room_for_the_snapshot_loses_nothing(tmp_path, monkeypatch, expected_warnings):
    expected_warnings.append("no snapshot: No space left on device")
    settings = config(tmp_path)

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        async with running(settings) as engine:
            contents = await fill(engine)
            patched.setattr(recovery.SnapshotWriter, "finish", full)
    assert not (tmp_path / "data0" / "snapshot.new").exists()
    async with running(settings) as engine:
        assert await contents_of(engine) == contents


async def test_a_failure_beside_the_engine_still_stops_it_cleanly(tmp_path):
    settings = config(tmp_path)
    with pytest.RaisesGroup(RuntimeError, flatten_subgroups=True):
        async with running(settings) as engine:
            contents = await fill(engine)
            raise RuntimeError
    async with running(settings) as engine:
        assert all(e.proven for e in engine.volumes[0].catalog.index.entries()), "from a clean snapshot"
        assert await contents_of(engine) == contents


def test_the_engine_refuses_when_one_directory_is_in_use(tmp_path):
    first = Engine(config(tmp_path))
    try:
        with pytest.raises(Exception, match="in use by another"):
            Engine(config(tmp_path, mountpoints=2))
    finally:
        first.volumes[0].store.close()
    second = Engine(config(tmp_path, mountpoints=2))  # what was opened was given up
    for volume in second.volumes:
        volume.store.close()


async def test_what_nobody_opened_since_its_commit_is_known_to_be_ours_alone(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        await put(engine, session, "a", b"x")
        await put(engine, session, "b", b"x")
        opened = await engine.open_many(session, 0, ["b"])
        engine.release(session, opened.lease)
        assert [bool(e.flags & SOLE) for e in await engine.page(0, "", "", 9)] == [True, False]
    async with running(config(tmp_path)) as engine:
        found = await engine.page(0, "", "", 9)
        assert [bool(e.flags & SOLE) for e in found] == [False, False], "who knows after a restart"
