"""The engine on real directories, without a face."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
import trio
import trio.lowlevel

from kvcsfs.engine import recovery
from kvcsfs.engine.engine import EXPIRY_SECONDS, Engine
from kvcsfs.engine.entry import BLOCK, SOLE, Entry, charge
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
    Gate,
    bytes_on_disk,
    checksum,
    config,
    get,
    keys,
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

OBJECT = 256 << 10  # charged bytes of a value that fills 16 to the store
VALUE = OBJECT - BLOCK


def ledger(engine: Engine, index: int = 0):
    return engine.volumes[index].catalog.ledger


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


# -- capacity and eviction


async def test_the_least_recently_used_go_first(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        names = [f"k{i:02}" for i in range(CAPACITY // OBJECT)]
        for name in names:
            assert await put(engine, session, name, name.encode() * (VALUE // 3)) is None
        await get(engine, session, "k00")
        await engine.query_many(0, ["k01"])
        await engine.query_many(0, ["k02"], renew=True)
        await put(engine, session, "new1", b"n" * VALUE)
        await put(engine, session, "new2", b"n" * VALUE)
        assert set(names) - set(await keys(engine)) == {"k01", "k03"}
        assert ledger(engine).used <= CAPACITY
        assert bytes_on_disk(tmp_path / "data0") == ledger(engine).used
        assert engine.status()["mountpoints"][0]["evictions"] == 2


async def test_evicted_while_pinned_stays_readable_and_counted(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        await put(engine, session, "k", b"x" * VALUE)
        opened = await engine.open_many(session, 0, ["k"])
        await engine.delete_many(0, ["k"])
        assert ledger(engine).retired == OBJECT
        for i in range(2 * CAPACITY // OBJECT):
            assert await put(engine, session, f"n{i}", b"n" * VALUE) is None
            assert ledger(engine).used <= CAPACITY
        assert os.pread(opened.fds[0], VALUE, 0) == b"x" * VALUE
        assert ledger(engine).retired == OBJECT
        engine.release(session, opened.lease)
        await settle(engine)
        assert ledger(engine).retired == 0
        assert bytes_on_disk(tmp_path / "data0") == ledger(engine).used


async def test_a_lease_ends_with_its_session(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        await put(engine, session, "k", b"x")
        opened = await engine.open_many(session, 0, ["k"])
        staged = await reserve(engine, session, "j", 1)
        os.close(staged.fd)
        await engine.close_session(session)
        (entry,) = await engine.query_many(0, ["k"])
        assert entry is not None
        assert entry.pins == 0
        engine.release(session, opened.lease)
        assert entry.pins == 0, "an unknown lease is nothing"
        assert engine.status()["reservations"] == engine.status()["leases"] == 0
        assert ledger(engine).reserved == 0


@pytest.mark.usefixtures("in_threads")
async def test_a_session_that_closes_while_it_reserves_keeps_nothing(tmp_path, monkeypatch):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        preparing = Gate(monkeypatch, "stage_many")

        async def reserving() -> None:
            with pytest.raises(ReservationError, match="closed"):
                await engine.reserve_many(session, 0, ["a", "b"], [1, 1])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reserving)
            await preparing.reached.wait()
            await engine.close_session(session)
            preparing.go.set()
        await settle(engine)
        assert ledger(engine).reserved == 0
        assert all(open_count(path) <= 1 for path in slot_files(tmp_path / "data0")), (
            "free slots keep one descriptor"
        )
        assert open_count(path_of(tmp_path / "data0", 0)) == 0


async def test_a_session_reserves_at_most_a_quarter(tmp_path):
    async with running(config(tmp_path)) as engine:
        session, other = engine.session(0), engine.session(0)
        many = CAPACITY // OBJECT
        results = await engine.reserve_many(session, 0, [f"k{i}" for i in range(many)], [VALUE] * many)
        got = [r for r in results if isinstance(r, Staged)]
        assert len(got) == many // 4
        assert results[: many // 4] == got, "the keys that fit, in order"
        assert all(isinstance(r, CapacityError) for r in results[many // 4 :])
        assert session.reserved == ledger(engine).reserved == CAPACITY // 4
        more = await reserve(engine, other, "other", VALUE)
        for s in [*got, more]:
            os.close(s.fd)
        await engine.abort_many(session, [s.token for s in got])
        again = await reserve(engine, session, "one value alone may be larger", CAPACITY // 2)
        os.close(again.fd)


async def test_eviction_by_prefix_and_by_bytes(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        for key in ("a/1", "b/1", "a/2", "b/2"):
            await put(engine, session, key, b"x" * VALUE)
        assert await engine.evict(0, "b/", 1) == (1, OBJECT)
        assert await keys(engine) == ["a/1", "a/2", "b/2"]
        opened = await engine.open_many(session, 0, ["a/1"])
        assert await engine.evict(0, "", 0) == (2, 2 * OBJECT)
        assert await keys(engine) == ["a/1"], "the pinned are passed over"
        engine.release(session, opened.lease)
        assert await engine.remove_prefix(0, "a") == (1, OBJECT)
        assert await engine.usage(0, "") == (0, 0, 0)


async def test_free_slots_are_a_twentieth_at_most(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        names = [f"k{i}" for i in range(100)]
        for key, value in values(names).items():
            await put(engine, session, key, value)
        async with trio.open_nursery() as nursery:
            for key in names:
                nursery.start_soon(engine.delete_many, 0, [key])
        assert 0 < ledger(engine).free_slots <= CAPACITY // 20
        assert bytes_on_disk(tmp_path / "data0") == ledger(engine).used == ledger(engine).free_slots


async def test_room_is_kept_between_the_watermarks(tmp_path):
    settings = config(tmp_path)
    point = settings.mountpoints[0]
    point = type(point)(point.path, CAPACITY, low_watermark=0.25, high_watermark=0.5)
    async with running(type(settings)((point,), settings.socket)) as engine:
        session = engine.session(0)
        for i in range(CAPACITY // OBJECT * 3 // 4):
            await put(engine, session, f"k{i:02}", b"x" * VALUE)
        assert len(await keys(engine)) == 12, "exactly the low watermark is free"
        await put(engine, session, "last", b"x" * VALUE)
        with trio.fail_after(5):
            while engine.volumes[0].catalog.room < CAPACITY // 2:
                await trio.sleep(0.001)
        await settle(engine)
        assert await keys(engine) == [f"k{i:02}" for i in range(5, 12)] + ["last"]


# -- reservations expire


async def test_a_reservation_expires(tmp_path, autojump_clock):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        (staged,) = await engine.reserve_many(session, 0, ["k"], [5000], ttl_seconds=10)
        assert isinstance(staged, Staged)
        write(staged, b"x" * 5000)
        await trio.sleep(9)
        assert session.staged
        await trio.sleep(1 + EXPIRY_SECONDS)
        await settle(engine)
        assert not session.staged
        assert ledger(engine).reserved == session.reserved == 0
        (late,) = await engine.commit_many(session, [staged.token], [checksum(b"x" * 5000)])
        assert isinstance(late, ReservationError)
        assert await get(engine, session, "k") is None


# -- files of unknown size


async def test_a_file_grows_and_becomes_a_value(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0, 0)
        staged = await engine.stage_file(session, 0, "m/x.tmp")
        await engine.grow(session, staged, 100_000)
        os.pwrite(staged.fd, b"x" * 100_000, 0)
        await engine.grow(session, staged, 110_000)
        assert staged.charged == charge(200_000), "doubled"
        os.pwrite(staged.fd, b"y", 100_000)
        assert session.reserved == ledger(engine).reserved == charge(200_000)
        await engine.commit_file(session, staged, "m/x", 100_001, None)
        assert session.reserved == ledger(engine).reserved == 0
        assert ledger(engine).committed == charge(100_001) == bytes_on_disk(tmp_path / "data0")
        (found,) = await engine.query_many(0, ["m/x"])
        assert found is not None
        assert found.checksum == checksum(b"x" * 100_000 + b"y")
        assert not found.temporary
        assert await get(engine, session, "m/x") == b"x" * 100_000 + b"y"


async def test_a_file_that_finds_no_room_to_grow_keeps_what_it_has(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0, 0)
        staged = await engine.stage_file(session, 0, "big")
        await engine.grow(session, staged, CAPACITY - BLOCK)
        assert staged.charged == CAPACITY, "too large to double"
        with pytest.raises(CapacityError):
            await engine.grow(session, staged, CAPACITY)
        assert ledger(engine).reserved == session.reserved == CAPACITY
        await engine.abort_file(session, staged)
        assert ledger(engine).used == 0
        assert slot_files(tmp_path / "data0") == []


async def test_a_growing_file_evicts(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0, 0)
        for i in range(CAPACITY // OBJECT):
            await put(engine, session, f"k{i:02}", b"x" * VALUE)
        staged = await engine.stage_file(session, 0, "new")
        await engine.grow(session, staged, CAPACITY // 2)
        assert ledger(engine).used <= CAPACITY
        await engine.commit_file(session, staged, "new", CAPACITY // 2, None)
        assert "k15" in await keys(engine)
        assert "k00" not in await keys(engine)


async def test_temporary_names_count_and_are_no_keys_for_the_sdk(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0, 0)
        staged = await engine.stage_file(session, 0, "m/x.tmp")
        await engine.grow(session, staged, 5000)
        os.pwrite(staged.fd, b"x" * 5000, 0)
        await engine.commit_file(session, staged, "m/x.tmp", 5000, checksum(b"x" * 5000))
        assert await engine.query_many(0, ["m/x.tmp"]) == [None]
        assert await get(engine, session, "m/x.tmp") is None
        (missing,) = await engine.delete_many(0, ["m/x.tmp"])
        assert isinstance(missing, NotFoundError)
        assert await engine.usage(0, "m/") == (1, 5000, charge(5000))
        (seen,) = await engine.query_many(0, ["m/x.tmp"], temporaries=True)
        assert seen is not None
        await engine.rename(0, "m/x.tmp", "m/x")
        assert await get(engine, session, "m/x") == b"x" * 5000
        await engine.rename(0, "m/x", "m/y.tmp")
        assert await engine.evict(0, "", 0) == (1, charge(5000)), "evicted like values"


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
