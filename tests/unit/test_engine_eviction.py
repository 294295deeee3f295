"""What the engine makes room for and how: eviction, reservations, and files that grow."""

from __future__ import annotations

import os

import pytest
import trio

from kvcsfs.engine.engine import EXPIRY_SECONDS
from kvcsfs.engine.entry import BLOCK, charge
from kvcsfs.engine.session import Staged
from kvcsfs.errors import CapacityError, NotFoundError, ReservationError
from tests.stores import (
    CAPACITY,
    OBJECT,
    VALUE,
    Gate,
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
