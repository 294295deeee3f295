"""The races that the design decides, each made to happen, against the engine and real files."""

from __future__ import annotations

import array
import dataclasses
import errno
import mmap
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path

import pytest
import trio
import trio.testing

from kvcsfs.engine import engine as engine_module
from kvcsfs.engine import store
from kvcsfs.engine.engine import Engine
from kvcsfs.engine.entry import BLOCK, Entry
from kvcsfs.engine.session import Session, Staged
from kvcsfs.engine.store import SlotStore
from kvcsfs.errors import BackingError, BusyError, CapacityError, NotFoundError, ReservationError
from tests.stores import (
    CAPACITY,
    Gate,
    bytes_on_disk,
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

VALUE = (256 << 10) - BLOCK
COUNT = CAPACITY // (256 << 10)


async def entry_of(engine: Engine, key: str) -> Entry:
    (found,) = await engine.query_many(0, [key])
    assert found is not None
    return found


def adds_up(engine: Engine) -> None:
    """Counters, and a walk of the disk, agree."""
    engine.check()
    volume = engine.volumes[0]
    assert volume.catalog.ledger.used == bytes_on_disk(volume.config.path) <= CAPACITY


# -- reuse while somebody can still read: the holder released its lease and kept the descriptor


class Held(AbstractContextManager["Held"]):
    """What a client that breaks the rules still has of an object; `read` gives its bytes."""

    def __init__(self, fd: int, how: str) -> None:
        self._stack = ExitStack()
        if how == "in flight":
            near, far = (self._stack.enter_context(s) for s in socket.socketpair())
            near.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
            self.read: Callable[[], bytes] = lambda: self._receive(far)
        elif how == "mapped":
            view = self._stack.enter_context(closing(mmap.mmap(fd, 0, prot=mmap.PROT_READ)))
            self.read = lambda: bytes(view[:VALUE])
        else:
            copy = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY) if how == "reopened" else os.dup(fd)
            self._stack.callback(os.close, copy)
            self.read = lambda: os.pread(copy, VALUE, 0)

    def _receive(self, far: socket.socket) -> bytes:
        _, ((_, _, content),), _, _ = far.recvmsg(1, socket.CMSG_SPACE(4))
        (fd,) = array.array("i", content)
        self._stack.callback(os.close, fd)
        return os.pread(fd, VALUE, 0)

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


@pytest.mark.parametrize("how", ["duplicated", "reopened", "mapped", "in flight"])
@pytest.mark.parametrize("leave", ["evict by a put", "evict", "delete", "replace"])
async def test_nothing_is_written_over_what_somebody_can_read(tmp_path, how, leave):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        await put(engine, session, "old", b"o" * VALUE)
        path = path_of(tmp_path / "data0", (await entry_of(engine, "old")).slot)
        opened = await engine.open_many(session, 0, ["old"])
        with Held(opened.fds[0], how) as held:
            engine.release(session, opened.lease)
            if leave == "evict":
                await engine.evict(0, "", 0)
            elif leave == "delete":
                await engine.delete_many(0, ["old"])
            elif leave == "replace":
                await put(engine, session, "old", b"n" * VALUE)
            for i in range(2 * COUNT):
                assert await put(engine, session, f"n{i}", b"n" * VALUE) is None
            assert held.read() == b"o" * VALUE
            assert not path.exists(), "unlinked instead"
        adds_up(engine)


async def test_a_slot_that_nobody_holds_is_used_again(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        for i in range(COUNT):
            await put(engine, session, f"k{i}", b"o" * VALUE)
        before = {p.stat().st_ino for p in slot_files(tmp_path / "data0")}
        for i in range(COUNT):
            await get(engine, session, f"k{i}")
            await put(engine, session, f"n{i}", b"n" * VALUE)
        assert {p.stat().st_ino for p in slot_files(tmp_path / "data0")} == before
        adds_up(engine)


# -- writers that break the rules


async def test_a_writable_descriptor_kept_past_commit_fails_that_key_alone(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        await put(engine, session, "bad", b"before")
        staged = await engine.reserve_many(session, 0, ["good1", "bad", "good2"], [VALUE] * 3)
        tokens = []
        for s in staged:
            assert isinstance(s, Staged)
            os.pwrite(s.fd, b"x" * VALUE, 0)
            tokens.append(s.token)
        kept = staged[1]
        assert isinstance(kept, Staged)
        for s in (staged[0], staged[2]):
            assert isinstance(s, Staged)
            os.close(s.fd)
        result = await engine.commit_many(session, tokens, [checksum(b"x" * VALUE)] * 3)
        assert [type(r) for r in result] == [type(None), BusyError, type(None)]
        assert await get(engine, session, "bad") == b"before"
        await engine.evict(0, "good", 0)
        for i in range(COUNT - 1):
            await put(engine, session, f"n{i}", b"n" * VALUE)
        os.pwrite(kept.fd, b"late" * 1000, 0)
        for i in range(COUNT - 1):
            assert await get(engine, session, f"n{i}") in (b"n" * VALUE, None)
        assert not os.fstat(kept.fd).st_nlink, "its slot is not used again"
        os.close(kept.fd)
        adds_up(engine)


async def test_a_client_that_dies_between_write_and_commit(tmp_path):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        await put(engine, session, "k", b"before")
        dying = engine.session(0)
        write(await reserve(engine, dying, "k", VALUE), b"x" * VALUE)
        write(await reserve(engine, dying, "new", VALUE), b"x" * VALUE)
        await engine.close_session(dying)
        assert await get(engine, session, "k") == b"before"
        assert await keys(engine) == ["k"]
        assert engine.volumes[0].catalog.ledger.reserved == 0
        adds_up(engine)


@pytest.mark.parametrize("change", [-1, BLOCK, 4 << 20])
async def test_a_writer_that_changes_the_size_gets_nothing_stored(tmp_path, change):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        staged = await reserve(engine, session, "k", VALUE)
        os.ftruncate(staged.fd, staged.charged + change)
        os.close(staged.fd)
        (result,) = await engine.commit_many(session, [staged.token], [bytes(16)])
        assert result is not None
        assert result.errno == errno.EINVAL
        assert await keys(engine) == []
        await settle(engine)
        adds_up(engine)


async def test_a_reservation_that_expires_under_its_writer(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "EXPIRY_SECONDS", 0.01)
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        (staged,) = await engine.reserve_many(session, 0, ["k"], [VALUE], ttl_seconds=0.02)
        assert isinstance(staged, Staged)
        with trio.fail_after(10):
            while engine.volumes[0].catalog.ledger.used:
                await trio.sleep(0.005)
        assert slot_files(tmp_path / "data0") == [], "not a free slot while somebody can write it"
        for i in range(COUNT):
            await put(engine, session, f"n{i}", b"n" * VALUE)
        write(staged, b"x" * VALUE)
        (late,) = await engine.commit_many(session, [staged.token], [checksum(b"x" * VALUE)])
        assert isinstance(late, ReservationError)
        assert [await get(engine, session, f"n{i}") for i in range(COUNT)] == [b"n" * VALUE] * COUNT
        adds_up(engine)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("how", ["delete", "remove", "evict", "put", "replace"])
async def test_what_left_never_comes_back_after_a_crash(tmp_path, how, pinned):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        await put(engine, session, "gone", b"o" * VALUE)
        opened = await engine.open_many(session, 0, ["gone"] if pinned else [])
        if how == "delete":
            await engine.delete_many(0, ["gone"])
        elif how == "remove":
            await engine.remove_prefix(0, "go")
        elif how == "replace":
            await put(engine, session, "gone", b"n" * VALUE)
            await engine.delete_many(0, ["gone"])
        else:
            engine.release(session, opened.lease)  # a pinned entry is passed over
            if how == "evict":
                await engine.evict(0, "gone", 0)
            for i in range(COUNT):
                await put(engine, session, f"n{i}", b"n" * VALUE)
        left = await keys(engine)
        shutil.copytree(tmp_path / "data0", tmp_path / "crash" / "data0")
        await engine.close_session(session)
    async with running(config(tmp_path / "crash")) as engine:
        assert await keys(engine) == left
        assert "gone" not in left
        adds_up(engine)


# What says that "k0" is gone, and how.
GONE: dict[str, tuple[Callable[[Engine, Session], Awaitable[object]], object]] = {
    "get": (lambda engine, session: get(engine, session, "k0"), None),
    "query": (lambda engine, _: engine.query_many(0, ["k0"]), [None]),
    "check": (lambda engine, _: engine.verify_many(0, ["k0"]), [0]),
    "list": (lambda engine, _: engine.page(0, "k0", "", 9), []),
    "usage": (lambda engine, _: engine.usage(0, "k0"), (0, 0, 0)),
    "remove": (lambda engine, _: engine.remove_prefix(0, "k0"), (0, 0)),
    "evict": (lambda engine, _: engine.evict(0, "k0", 0), (0, 0)),
}


@pytest.mark.parametrize(
    ("leave", "job"),
    [
        ("put of another size", "make_room"),
        ("put of this size", "stage_many"),
        ("evict", "unlink_many"),
        ("delete", "unlink_many"),
    ],
)
@pytest.mark.parametrize("told", [*GONE, "delete", "replace and delete"])
async def test_nobody_is_told_that_a_key_is_gone_before_it_cannot_come_back(
    tmp_path, monkeypatch, leave, job, told
):
    async with running(config(tmp_path)) as engine:
        session, other = engine.session(0), engine.session(1)
        newer = await reserve(engine, other, "k0", 1)
        write(newer, b"2")
        for i in range(COUNT - 1):
            await put(engine, session, f"k{i}", b"o" * VALUE)
        leaving, answered = Gate(monkeypatch, job), trio.Event()

        async def go() -> None:
            if leave == "evict":
                await engine.evict(0, "k0", 0)
            elif leave == "delete":
                await engine.delete_many(0, ["k0"])
            else:
                for name in ("n0", "n1"):
                    staged = await reserve(engine, session, name, VALUE // 2 if "another" in leave else VALUE)
                    os.close(staged.fd)

        async def look() -> None:
            if told in GONE:
                ask, answer = GONE[told]
                assert await ask(engine, other) == answer
            else:
                if told != "delete":
                    assert await engine.commit_many(other, [newer.token], [checksum(b"2")]) == [None]
                await engine.delete_many(0, ["k0"])
            shutil.copytree(tmp_path / "data0", tmp_path / "crash" / "data0")
            answered.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(go)
            await leaving.reached.wait()
            nursery.start_soon(look)
            with trio.move_on_after(0.1):
                await answered.wait()
            leaving.go.set()
        await engine.close_session(session)
        await engine.close_session(other)
        await settle(engine)
        adds_up(engine)
    async with running(config(tmp_path / "crash")) as engine:
        assert "k0" not in await keys(engine)


async def test_a_delete_is_answered_when_all_of_it_is_void(tmp_path, monkeypatch):
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        for key in ("held", "free"):
            await put(engine, session, key, b"o" * 100)
        await engine.open_many(session, 0, ["held"])
        voiding, recycling = Gate(monkeypatch, "void_many"), Gate(monkeypatch, "recycle_many")
        deleted = trio.Event()

        async def delete() -> None:
            await engine.delete_many(0, ["held", "free"])
            shutil.copytree(tmp_path / "data0", tmp_path / "crash" / "data0")
            deleted.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(delete)
            await voiding.reached.wait()
            engine.volumes[0].room.loose.set()  # another reader lets something go, and the background looks
            with trio.move_on_after(0.1):
                await recycling.reached.wait()
            voiding.go.set()
            with trio.move_on_after(0.1):
                await deleted.wait()
            recycling.go.set()
        await engine.close_session(session)
        await settle(engine)
        adds_up(engine)
    async with running(config(tmp_path / "crash")) as engine:
        assert await keys(engine) == []


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


# -- the world fails


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


# -- killed at each step of a commit


KILLED = """
import os, sys, trio
from pathlib import Path
sys.path[:0] = {path!r}
from kvcsfs.engine import engine as engine_module
from kvcsfs.engine import store
from tests import stores

async def main():
    async with stores.running(stores.config(Path({data!r}))) as engine:
        session = engine.session(0)
        await stores.put(engine, session, "kept", b"k" * 5000)
        await stores.put(engine, session, "key", b"old" * 1000)
        staged = await stores.reserve(engine, session, "key", 3000)
        stores.write(staged, b"new" * 1000)
        real, count = store.write_all, iter(range(99))
        def dying(fd, data, offset):
            step = next(count)
            if {torn} and step == {step}:
                real(fd, data[:1000], offset)
            if step == {step}:
                os.kill(os.getpid(), 9)
            real(fd, data, offset)
        store.write_all = dying
        await engine.commit_many(session, [staged.token], [stores.checksum(b"new" * 1000)])
        os.kill(os.getpid(), 9)

trio.run(main)
"""


@pytest.mark.parametrize(
    ("step", "torn", "value"),
    [
        pytest.param(0, False, b"old", id="before the footer"),
        pytest.param(0, True, b"old", id="within the footer"),
        pytest.param(1, False, b"new", id="before the old one is voided"),
        pytest.param(1, True, b"new", id="within the old footer"),
        pytest.param(2, False, b"new", id="before the old slot is recycled"),
        pytest.param(99, False, b"new", id="after the answer"),
    ],
)
async def test_killed_within_a_commit(tmp_path, step, torn, value):
    root = str(Path(__file__).parents[2])
    script = KILLED.format(path=[root], data=str(tmp_path), step=step, torn=torn)
    died = await trio.run_process([sys.executable, "-c", script], check=False, stderr=subprocess.STDOUT)
    assert died.returncode == -9
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        assert await keys(engine) == ["kept", "key"]
        assert await get(engine, session, "key") == value * 1000
        assert await get(engine, session, "kept") == b"k" * 5000
        assert await engine.verify_many(0, ["key", "kept"]) == [3000, 5000]
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
