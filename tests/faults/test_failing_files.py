"""Files that vanish or fail in one system call: the key fails alone, and its bytes stay counted."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil

import pytest
import trio
import trio.testing

from kvcsfs.engine import room, store
from kvcsfs.engine.entry import BLOCK
from kvcsfs.engine.session import Staged
from kvcsfs.engine.store import SlotStore
from kvcsfs.errors import BackingError, CapacityError
from tests.faults.accounting import adds_up, entry_of
from tests.stores import (
    CAPACITY,
    COUNT,
    VALUE,
    checksum,
    config,
    get,
    keys,
    path_of,
    put,
    reserve,
    running,
    settle,
    slot_files,
    values,
    write,
)

pytestmark = [pytest.mark.fault, pytest.mark.usefixtures("in_threads")]


async def test_a_backing_file_that_vanished_is_a_miss_and_its_bytes_come_back(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        await put(engine, session, "gone", b"x" * VALUE)
        await put(engine, session, "here", b"y" * VALUE)
        path_of(tmp_path / "data0", (await entry_of(engine, "gone")).slot).unlink()
        cold = engine.session(1)  # another user, so no descriptor is kept ready
        opened = await engine.open_many(cold, 0, ["gone", "here", "gone"])
        assert [e.key if e else None for e in opened.entries] == [None, "here", None]
        assert opened.errors == {}
        engine.release(cold, opened.lease)
        assert await keys(engine) == ["here"]
        await settle(engine)
        adds_up(engine)


async def test_evicting_replacing_and_deleting_files_that_vanished(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        for key in ("replaced", "deleted", "renamed", "evicted"):
            await put(engine, session, key, b"x" * VALUE)
        for path in slot_files(tmp_path / "data0"):
            path.unlink()
        assert await put(engine, session, "replaced", b"y" * VALUE) is None
        assert await engine.delete_many(0, ["deleted"]) == [None]
        with pytest.raises(BackingError):
            await engine.rename(0, "renamed", "other")
        await engine.delete_many(0, ["renamed"])
        assert await engine.evict(0, "evicted", 0) == (1, VALUE + BLOCK)
        assert await get(engine, session, "replaced") == b"y" * VALUE
        await settle(engine)
        adds_up(engine)


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ESTALE])
async def test_an_object_that_can_not_be_opened_fails_alone_and_stays(tmp_path, monkeypatch, number):
    async with running(config(tmp_path)) as engine:
        session, cold = engine.session(0), engine.session(1)
        await put(engine, session, "bad", b"x")
        await put(engine, session, "good", b"y")
        slot, real = (await entry_of(engine, "bad")).slot, SlotStore.open_read

        def failing(self, wanted):
            if wanted == slot:
                raise OSError(number, os.strerror(number))
            return real(self, wanted)

        with monkeypatch.context() as patched:
            patched.setattr(SlotStore, "open_read", failing)
            opened = await engine.open_many(cold, 0, ["bad", "good"])
        assert isinstance(opened.errors[0], BackingError)
        assert opened.entries[1] is not None
        assert os.pread(opened.fds[0], 1, 0) == b"y"
        engine.release(cold, opened.lease)
        assert engine.volumes[0].catalog.pinned == 0
        assert await get(engine, cold, "bad") == b"x"
        adds_up(engine)


async def test_a_victim_that_can_not_be_recycled_is_not_the_last(tmp_path, monkeypatch):
    """Its file is tried again later; another victim makes room for a new one."""
    monkeypatch.setattr(room, "RETRY_SECONDS", 0.05)
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        for i in range(COUNT):
            await put(engine, session, f"k{i}", b"x" * VALUE)

        def failing(*_args: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patched:
            patched.setattr(SlotStore, "recycle", failing)
            assert await put(engine, session, "a", b"x" * VALUE) is None
        assert engine.volumes[0].catalog.ledger.free >= 0
        await settle(engine)
        adds_up(engine)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
async def test_a_reserve_that_fails_gives_the_bytes_back(tmp_path, monkeypatch, number):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        await put(engine, session, "k", b"x" * VALUE)

        def failing(*_args: object) -> int:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patched:
            patched.setattr(SlotStore, "create", failing)
            results = await engine.reserve_many(session, 0, ["a", "b"], [VALUE] * 2)
        expected = CapacityError if number == errno.ENOSPC else BackingError
        assert [type(r) for r in results] == [expected] * 2
        assert session.reserved == engine.volumes[0].catalog.ledger.reserved == 0
        assert await put(engine, session, "a", b"x" * VALUE) is None
        await settle(engine)
        adds_up(engine)


async def test_a_commit_whose_footer_can_not_be_written(tmp_path, monkeypatch):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        await put(engine, session, "k", b"before")

        def failing(*_args: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patched:
            patched.setattr(store, "write_all", failing)
            assert isinstance(await put(engine, session, "k", b"x" * VALUE), BackingError)
        assert await get(engine, session, "k") == b"before"
        await settle(engine)
        adds_up(engine)


async def test_a_rename_stands_when_the_old_footer_can_not_be_voided(
    tmp_path, monkeypatch, expected_warnings
):
    expected_warnings.append("the footer of a replaced object can't be voided: Input/output error")
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        for key, value in values(["a", "b"]).items():
            await put(engine, session, key, value)

        def failing(*_args: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patched:
            patched.setattr(SlotStore, "void", failing)
            await engine.rename(0, "a", "b")
        assert await keys(engine) == ["b"]
        assert await get(engine, session, "b") == values(["a"])["a"]
        await settle(engine)
        adds_up(engine)


async def test_a_commit_stands_when_the_old_footer_can_not_be_voided(
    tmp_path, monkeypatch, expected_warnings
):
    expected_warnings.append("the footer of a replaced object can't be voided: Input/output error")
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        contents = values(["a", "b", "c"])
        for key in contents:
            await put(engine, session, key, b"before")

        def failing(*_args: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        staged = [await reserve(engine, session, key, 5000) for key in contents]
        for s, value in zip(staged, contents.values(), strict=True):
            write(s, value)
        with monkeypatch.context() as patched:
            patched.setattr(SlotStore, "void", failing)
            sums = [checksum(v) for v in contents.values()]
            assert await engine.commit_many(session, [s.token for s in staged], sums) == [None] * 3
        for key, value in contents.items():
            assert await get(engine, session, key) == value
        await settle(engine)
        adds_up(engine)


async def test_a_file_that_can_not_be_finished(tmp_path, monkeypatch):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0, 0)
        staged = await engine.stage_file(session, 0, "k")
        await engine.grow(session, staged, 5000)

        def failing(*_args: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "ftruncate", failing)
            with pytest.raises(CapacityError):
                await engine.commit_file(session, staged, "k", 5000, None)
        assert await keys(engine) == []
        assert session.reserved == engine.volumes[0].catalog.ledger.reserved == 0
        await settle(engine)
        adds_up(engine)


@pytest.mark.parametrize("call", ["unlink", "recycle"])
async def test_what_can_not_be_removed_stays_counted_and_is_tried_again(tmp_path, monkeypatch, call):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        await put(engine, session, "k", b"x" * VALUE)

        def failing(*_args: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patched:
            patched.setattr(SlotStore, "unlink", failing)
            patched.setattr(SlotStore, "recycle", failing)
            await engine.delete_many(0, ["k"])
            assert await keys(engine) == []
            assert engine.volumes[0].catalog.ledger.retired == VALUE + BLOCK
            adds_up(engine)
        await engine.volumes[0].room.reclaim(list(engine.volumes[0].catalog.retired))
        assert engine.volumes[0].catalog.ledger.retired == 0
        adds_up(engine)


@pytest.mark.parametrize("size", [VALUE // 2, VALUE, 3 * VALUE])
async def test_victims_that_can_not_be_removed_never_take_the_store_over_its_capacity(
    tmp_path, monkeypatch, size
):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0, 0)
        for i in range(COUNT):
            await put(engine, session, f"k{i:02}", b"x" * VALUE)

        def failing(*_args: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patched:
            patched.setattr(SlotStore, "unlink", failing)
            patched.setattr(SlotStore, "recycle", failing)
            results = await engine.reserve_many(session, 0, ["a", "b"], [size, size])
            adds_up(engine)
            with pytest.raises((BackingError, CapacityError)):
                await engine.stage_file(session, 0, "file")
            adds_up(engine)
        for r in results:
            if isinstance(r, Staged):
                os.close(r.fd)
        await engine.volumes[0].room.reclaim(list(engine.volumes[0].catalog.retired))
        assert await put(engine, session, "later", b"y" * VALUE) is None
        adds_up(engine)
        await engine.close_session(session)


async def test_files_that_can_not_be_removed_do_not_make_the_evictor_empty_the_store(tmp_path, monkeypatch):
    settings = config(tmp_path)
    point = dataclasses.replace(settings.mountpoints[0], low_watermark=0.1, high_watermark=0.1)
    async with running(dataclasses.replace(settings, mountpoints=(point,))) as engine:
        session = engine.session(0)
        small = CAPACITY // 200 // BLOCK * BLOCK - BLOCK
        tried: list[object] = []

        def failing(*_args: object) -> None:
            tried.append(_args)
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patched:
            patched.setattr(SlotStore, "unlink", failing)
            patched.setattr(SlotStore, "recycle", failing)
            for i in range(185):
                await put(engine, session, f"k{i:03}", b"x" * small)
            with trio.fail_after(10):
                while not tried:
                    await trio.sleep(0.001)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert len(await keys(engine)) > 50
        await engine.volumes[0].room.reclaim(list(engine.volumes[0].catalog.retired))
        adds_up(engine)


async def test_a_directory_that_was_removed_under_the_daemon(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        await put(engine, session, "k", b"x" * 5000)
        shutil.rmtree(tmp_path / "data0" / "slots")
        assert isinstance(await put(engine, session, "n", b"y" * 6000), BackingError)
        assert await get(engine, engine.session(1), "k") is None
        await settle(engine)
        engine.check()
        assert engine.volumes[0].catalog.ledger.used == 0
