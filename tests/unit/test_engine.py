"""The engine on real directories, without a face."""

from __future__ import annotations

import os
import shutil

import pytest
import trio

from kvcsfs.engine.engine import Engine
from kvcsfs.engine.entry import charge
from kvcsfs.engine.session import Staged
from kvcsfs.errors import (
    BusyError,
    CapacityError,
    ExistsError,
    InvalidKeyError,
    InvalidValueError,
    KeyTooLongError,
    MountpointError,
    NotFoundError,
    ReservationError,
)
from tests.stores import (
    CAPACITY,
    bytes_on_disk,
    checksum,
    config,
    get,
    keys,
    ledger,
    open_count,
    path_of,
    put,
    reserve,
    running,
    settle,
    slot_files,
    values,
    write,
)

# -- put and get


async def test_a_value_comes_back(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        assert await put(engine, session, "m/a", b"x" * 5000) is None
        assert await get(engine, session, "m/a") == b"x" * 5000
        assert await get(engine, session, "m/b") is None
        (found,) = await engine.query_many(0, ["m/a"])
        assert found is not None
        assert (found.size, found.checksum, found.proven) == (5000, checksum(b"x" * 5000), True)
        assert ledger(engine).committed == charge(5000) == bytes_on_disk(tmp_path / "data0")


async def test_nothing_is_visible_before_the_commit(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        staged = await reserve(engine, session, "k", 5000)
        write(staged, b"x" * 5000)
        assert await get(engine, session, "k") is None
        assert ledger(engine).reserved == charge(5000)
        await engine.abort_many(session, [staged.token])
        assert ledger(engine).reserved == 0
        assert session.reserved == 0
        (late,) = await engine.commit_many(session, [staged.token], [bytes(16)])
        assert isinstance(late, ReservationError)


async def test_replacing_keeps_the_old_value_for_who_reads_it(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        await put(engine, session, "k", b"old" * 1000)
        opened = await engine.open_many(session, 0, ["k"])
        await put(engine, session, "k", b"new" * 1000)
        assert os.pread(opened.fds[0], 3000, 0) == b"old" * 1000
        assert await get(engine, session, "k") == b"new" * 1000
        assert ledger(engine).retired == charge(3000)
        engine.release(session, opened.lease)
        await settle(engine)
        assert ledger(engine).retired == 0
        assert ledger(engine).used == bytes_on_disk(tmp_path / "data0")


async def test_a_replaced_slot_is_used_again(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        for i in range(5):
            assert await put(engine, session, "k", bytes([i]) * 5000) is None
        assert len(slot_files(tmp_path / "data0")) == 2
        assert await get(engine, session, "k") == b"\4" * 5000


@pytest.mark.parametrize("how", ["keep", "error"])
async def test_an_existing_value_is_kept_when_asked(tmp_path, how):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        await put(engine, session, "k", b"first")
        assert isinstance(await put(engine, session, "k", b"again", if_exists=how), ExistsError)
        racing = await reserve(engine, session, "other", 5)
        write(racing, b"later")
        await put(engine, session, "other", b"first")
        (late,) = await engine.commit_many(session, [racing.token], [checksum(b"later")], how)
        assert isinstance(late, ExistsError), "checked again at commit"
        assert await get(engine, session, "other") == b"first"
        assert ledger(engine).reserved == session.reserved == 0


async def test_the_last_commit_wins(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        first, second = await reserve(engine, session, "k", 1), await reserve(engine, session, "k", 1)
        write(first, b"1")
        write(second, b"2")
        await engine.commit_many(session, [second.token], [checksum(b"2")])
        await engine.commit_many(session, [first.token], [checksum(b"1")])
        assert await get(engine, session, "k") == b"1"


async def test_two_commits_of_one_key_at_once(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        staged = [await reserve(engine, session, "k", 1) for _ in range(4)]
        async with trio.open_nursery() as nursery:
            for s in staged:
                write(s, b"x")
                nursery.start_soon(engine.commit_many, session, [s.token], [checksum(b"x")])
        assert await get(engine, session, "k") == b"x"
        assert ledger(engine).committed == charge(1)


async def test_of_one_key_twice_in_a_put_the_last_wins(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        staged = await engine.reserve_many(session, 0, ["k", "k"], [1, 2])
        for s, value in zip(staged, (b"1", b"22"), strict=True):
            assert isinstance(s, Staged)
            write(s, value)
        tokens = [s.token for s in staged if isinstance(s, Staged)]
        assert await engine.commit_many(session, tokens, [checksum(b"1"), checksum(b"22")]) == [None, None]
        assert await get(engine, session, "k") == b"22"
        assert ledger(engine).committed == charge(2)


async def test_of_one_key_twice_in_a_put_that_fails_neither_is_told_as_stored(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        staged = await engine.reserve_many(session, 0, ["k", "k"], [1, 2])
        first, last = (s for s in staged if isinstance(s, Staged))
        write(first, b"1")
        write(last, b"22")
        other = os.open(path_of(tmp_path / "data0", last.entry.slot), os.O_RDONLY)  # so it can't be committed
        results = await engine.commit_many(session, [first.token, last.token], [b"x" * 16] * 2)
        os.close(other)
        assert [type(r) for r in results] == [BusyError, BusyError]
        assert await engine.query_many(0, ["k"]) == [None]


async def test_one_key_twice_in_a_get_opens_one_descriptor(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        await put(engine, session, "k", b"x" * 5000)
        (entry,) = await engine.page(0, "", "", 1)
        path = path_of(tmp_path / "data0", entry.slot)
        other = engine.session(1)
        opened = await engine.open_many(other, 0, ["k", "none", "k"])
        assert opened.entries == [entry, None, entry]
        assert opened.fds[0] == opened.fds[1]
        assert open_count(path) == 1
        engine.release(other, opened.lease)
        assert entry.pins == 0


async def test_what_can_not_be_put(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        cases: list[tuple[str, int, type[Exception]]] = [
            ("", 1, InvalidKeyError),
            ("a\0", 1, InvalidKeyError),
            ("m/x.tmp", 1, InvalidKeyError),
            ("x" * 1025, 1, KeyTooLongError),
            ("empty", 0, InvalidValueError),
            ("negative", -1, InvalidValueError),
            ("huge", (4 << 30) + 1, InvalidValueError),
            ("larger than the store", CAPACITY, CapacityError),
        ]
        results = await engine.reserve_many(session, 0, [c[0] for c in cases], [c[1] for c in cases])
        assert [type(r) for r in results] == [c[2] for c in cases]
        assert ledger(engine).used == session.reserved == 0


async def test_delete_and_its_misses(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        await put(engine, session, "a", b"x")
        result = await engine.delete_many(0, ["a", "b", "a"])
        assert [type(r) for r in result] == [type(None), NotFoundError, NotFoundError]
        assert await get(engine, session, "a") is None
        assert ledger(engine).committed == 0


async def test_a_deleted_value_stays_readable_and_does_not_come_back(tmp_path):
    settings = config(tmp_path)
    async with running(settings) as engine:
        session = engine.session(0)
        await put(engine, session, "a", b"x" * 5000)
        opened = await engine.open_many(session, 0, ["a"])
        await engine.delete_many(0, ["a"])
        assert os.pread(opened.fds[0], 5000, 0) == b"x" * 5000
        shutil.copytree(tmp_path / "data0", tmp_path / "crash" / "data0")
        engine.release(session, opened.lease)
    async with running(config(tmp_path / "crash")) as engine:
        assert await keys(engine) == []


async def test_many_tasks_at_once_leave_a_store_that_adds_up(tmp_path):
    settings = config(tmp_path, 2 << 20)

    async def worker(engine: Engine, number: int) -> None:
        session = engine.session(number % 2)
        for turn in range(12):
            key = f"k{(number * 7 + turn * 5) % 40}"
            value = f"{key}.{number}.{turn}.".encode() * 4000
            result = await put(engine, session, key, value)
            assert result is None or isinstance(result, CapacityError)
            found = await get(engine, session, f"k{turn}")
            assert found is None or found.startswith(f"k{turn}.".encode())
            if turn % 5 == 0:
                await engine.delete_many(0, [key])
        await engine.close_session(session)

    async with running(settings) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(worker, engine, number)
        await settle(engine)
        engine.check()
        assert ledger(engine).reserved == ledger(engine).retired == 0
        assert ledger(engine).used <= 2 << 20
        assert bytes_on_disk(tmp_path / "data0") == ledger(engine).used


# -- rename


async def test_rename_replaces(tmp_path):
    settings = config(tmp_path)
    async with running(settings) as engine:
        session = engine.session(0)
        for key, value in values(["a", "b"]).items():
            await put(engine, session, key, value)
        await engine.rename(0, "a", "b")
        assert await get(engine, session, "a") is None
        assert await get(engine, session, "b") == values(["a"])["a"]
        with pytest.raises(NotFoundError):
            await engine.rename(0, "a", "c")
        shutil.copytree(tmp_path / "data0", tmp_path / "crash" / "data0")
    async with running(config(tmp_path / "crash")) as engine:
        assert await get(engine, engine.session(0), "b") == values(["a"])["a"]
        assert await keys(engine) == ["b"]


async def test_rename_to_itself_changes_nothing(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        await put(engine, session, "a", b"x" * 5000)
        await engine.rename(0, "a", "a")
        assert await get(engine, session, "a") == b"x" * 5000
        shutil.copytree(tmp_path / "data0", tmp_path / "crash" / "data0")
    async with running(config(tmp_path / "crash")) as engine:
        assert await keys(engine) == ["a"]


async def test_rename_of_an_open_value(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        await put(engine, session, "a", b"x" * 5000)
        opened = await engine.open_many(session, 0, ["a"])
        await engine.rename(0, "a", "b")
        assert os.pread(opened.fds[0], 5000, 0) == b"x" * 5000
        engine.check()
        engine.release(session, opened.lease)
        assert await get(engine, session, "b") == b"x" * 5000


# -- mountpoints


async def test_pooled_mountpoints_are_apart(tmp_path):
    async with running(config(tmp_path, mountpoints=2, backend="pooled")) as engine:
        session = engine.session(0)
        await put(engine, session, "k", b"zero", 0)
        await put(engine, session, "k", b"one", 1)
        assert await get(engine, session, "k", 0) == b"zero"
        assert await get(engine, session, "k", 1) == b"one"
        await engine.delete_many(1, ["k"])
        assert await get(engine, session, "k", 0) == b"zero"
        for index in (2, -1):
            with pytest.raises(MountpointError, match="expected 0 to 1"):
                await engine.query_many(index, ["k"])


async def test_direct_mountpoints_ignore_the_index(tmp_path):
    async with running(config(tmp_path, mountpoints=2)) as engine:
        session = engine.session(0)
        await put(engine, session, "k", b"x", 7)
        assert await get(engine, session, "k", 0) == b"x"
        assert ledger(engine, 1).used == 0


async def test_tokens_of_two_mountpoints_differ(tmp_path):
    async with running(config(tmp_path, mountpoints=2, backend="pooled")) as engine:
        session = engine.session(0)
        a, b = await reserve(engine, session, "k", 1, 0), await reserve(engine, session, "k", 1, 1)
        write(a, b"a")
        write(b, b"b")
        sums = [checksum(b"b"), checksum(b"a")]
        assert await engine.commit_many(session, [b.token, a.token], sums) == [None, None]
        assert [await get(engine, session, "k", i) for i in (0, 1)] == [b"a", b"b"]


# -- looking never renews


async def test_listing_and_children(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        for key in ("a/1", "a/b/2", "c"):
            await put(engine, session, key, b"x")
        before = [e.key for e in engine.volumes[0].catalog.victims()]
        assert [e.key for e in await engine.page(0, "a/", "a/1", 5)] == ["a/b/2"]
        assert await engine.children(0, "", "", 5) == ["a/", "c"]
        assert await engine.children(0, "a/", "1", 5) == ["b/"]
        entry = await engine.find(0, "c")
        assert await engine.look_many(0, ["a/b", "c", "d"]) == [(None, True), (entry, False), (None, False)]
        assert [e.key for e in engine.volumes[0].catalog.victims()] == before


async def test_watchers_hear_of_every_change(tmp_path):
    heard: list[tuple[int, str]] = []
    async with running(config(tmp_path)) as engine:
        engine.watchers.append(lambda index, names: heard.extend((index, n) for n in names))
        session = engine.session(0)
        for key in ("a", "b", "c"):
            await put(engine, session, key, b"x")
        await engine.rename(0, "a", "d")
        await engine.delete_many(0, ["b"])
        await engine.evict(0, "c", 0)
        for path in slot_files(tmp_path / "data0"):
            path.unlink()
        assert await get(engine, engine.session(5), "d") is None
    assert heard == [(0, n) for n in ("a", "b", "c", "a", "d", "b", "c", "d")]
