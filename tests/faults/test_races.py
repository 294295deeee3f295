"""The races that the design decides, each made to happen, against the engine and real files."""

from __future__ import annotations

import os

import pytest
import trio
import trio.testing

from kvcsfs.engine.session import Session, Staged
from kvcsfs.errors import CapacityError, NotFoundError, ReservationError
from tests.faults.accounting import adds_up, entry_of
from tests.stores import (
    COUNT,
    VALUE,
    Gate,
    checksum,
    config,
    get,
    keys,
    path_of,
    put,
    reserve,
    running,
    settle,
    values,
    write,
)

pytestmark = [pytest.mark.fault, pytest.mark.usefixtures("in_threads")]


# -- steps that meet


async def test_replace_against_open(tmp_path, monkeypatch):
    async with running(config(tmp_path)) as engine:
        session, reader = engine.session(0), engine.session(1)
        await put(engine, session, "k", b"o" * VALUE)
        opening = Gate(monkeypatch, "open_many")
        seen: list[bytes] = []

        async def read() -> None:
            opened = await engine.open_many(reader, 0, ["k"])
            seen.append(os.pread(opened.fds[0], VALUE, 0))
            engine.release(reader, opened.lease)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await opening.reached.wait()
            for turn in range(3):
                await put(engine, session, "k", bytes([turn]) * VALUE)
            opening.go.set()
        assert seen == [b"o" * VALUE], "the value it found, whole"
        assert await get(engine, session, "k") == b"\2" * VALUE
        await settle(engine)
        adds_up(engine)


@pytest.mark.parametrize("what", ["delete", "evict", "rename"])
async def test_open_against_what_takes_the_key_away(tmp_path, monkeypatch, what):
    async with running(config(tmp_path)) as engine:
        session, reader = engine.session(0), engine.session(1)
        await put(engine, session, "k", b"o" * VALUE)
        opening = Gate(monkeypatch, "open_many")
        seen: list[bytes] = []

        async def read() -> None:
            opened = await engine.open_many(reader, 0, ["k"])
            seen.append(os.pread(opened.fds[0], VALUE, 0))
            engine.release(reader, opened.lease)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await opening.reached.wait()
            if what == "delete":
                await engine.delete_many(0, ["k"])
            elif what == "evict":
                assert await engine.evict(0, "", 0) == (0, 0), "the pinned are passed over"
            else:
                await engine.rename(0, "k", "j")
            opening.go.set()
        assert seen == [b"o" * VALUE]
        await settle(engine)
        adds_up(engine)


async def test_a_commit_against_a_delete_of_its_key(tmp_path, monkeypatch):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        await put(engine, session, "k", b"old")
        staged = await reserve(engine, session, "k", 3)
        write(staged, b"new")
        sealing = Gate(monkeypatch, "seal_many")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.commit_many, session, [staged.token], [checksum(b"new")])
            await sealing.reached.wait()
            nursery.start_soon(engine.delete_many, 0, ["k"])
            await trio.testing.wait_all_tasks_blocked()
            assert await get(engine, session, "k") == b"old"
            sealing.go.set()
        assert await keys(engine) == [], "the delete came second"
        await settle(engine)
        adds_up(engine)


async def test_a_commit_completes_whoever_waits_for_it(tmp_path, monkeypatch):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        staged = await reserve(engine, session, "k", 3)
        write(staged, b"new")
        sealing = Gate(monkeypatch, "seal_many")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.commit_many, session, [staged.token], [checksum(b"new")])
            await sealing.reached.wait()
            nursery.cancel_scope.cancel()
            nursery.start_soon(engine.close_session, session)
            sealing.go.set()
        assert await get(engine, engine.session(0), "k") == b"new"
        adds_up(engine)


async def test_an_abort_comes_too_late_for_a_commit_under_way(tmp_path, monkeypatch):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        staged = await reserve(engine, session, "k", 3)
        write(staged, b"new")
        sealing = Gate(monkeypatch, "seal_many")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.commit_many, session, [staged.token], [checksum(b"new")])
            await sealing.reached.wait()
            await engine.abort_many(session, [staged.token])
            (again,) = await engine.commit_many(session, [staged.token], [checksum(b"new")])
            assert isinstance(again, ReservationError)
            sealing.go.set()
        assert await get(engine, session, "k") == b"new"
        adds_up(engine)


async def test_a_rename_meets_a_reader_that_finds_the_file_gone(tmp_path, monkeypatch):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        await put(engine, session, "a", b"x" * VALUE)
        await put(engine, session, "b", b"y" * VALUE)
        renaming = Gate(monkeypatch, "rename")
        path = path_of(tmp_path / "data0", (await entry_of(engine, "a")).slot)

        async def rename() -> None:
            with pytest.raises(NotFoundError):
                await engine.rename(0, "a", "b")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(rename)
            await renaming.reached.wait()
            kept = path.with_name("kept")
            path.rename(kept)
            assert await get(engine, engine.session(1), "a") is None
            kept.rename(path)
            renaming.go.set()
        assert await get(engine, session, "a") is None
        engine.check()


# -- everything held


async def test_everything_pinned(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        contents = values([f"k{i}" for i in range(COUNT)], VALUE)
        for key, value in contents.items():
            await put(engine, session, key, value)
        opened = await engine.open_many(session, 0, list(contents))
        result = await put(engine, session, "new", b"n" * VALUE)
        assert isinstance(result, CapacityError)
        staged = None
        with pytest.raises(CapacityError):
            staged = await engine.stage_file(session, 0, "file")
        assert staged is None
        assert await engine.evict(0, "", 0) == (0, 0)
        for fd, value in zip(opened.fds, contents.values(), strict=True):
            assert os.pread(fd, VALUE, 0) == value
        assert set(await keys(engine)) == set(contents)
        adds_up(engine)
        engine.release(session, opened.lease)
        assert await put(engine, session, "new", b"n" * VALUE) is None
        adds_up(engine)


async def test_everything_reserved(tmp_path):
    async with running(config(tmp_path)) as engine:
        sessions = [engine.session(0) for _ in range(4)]
        staged: list[tuple[Session, Staged]] = []
        for n, session in enumerate(sessions):
            for i in range(COUNT // 4):
                staged.append((session, await reserve(engine, session, f"k{n}.{i}", VALUE)))
        late = engine.session(0)
        (refused,) = await engine.reserve_many(late, 0, ["late"], [VALUE])
        assert isinstance(refused, CapacityError)
        for session, s in staged:
            write(s, b"x" * VALUE)
            assert await engine.commit_many(session, [s.token], [checksum(b"x" * VALUE)]) == [None]
        assert len(await keys(engine)) == COUNT, "nothing is lost"
        adds_up(engine)
