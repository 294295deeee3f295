"""Slots that are used again, and what left the store: nobody reads another's bytes, and nothing comes back."""

from __future__ import annotations

import array
import errno
import mmap
import os
import shutil
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack, closing

import pytest
import trio

from kvcsfs.engine import engine as engine_module
from kvcsfs.engine.engine import Engine
from kvcsfs.engine.entry import BLOCK
from kvcsfs.engine.session import Session, Staged
from kvcsfs.errors import BusyError, ReservationError
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
    slot_files,
    write,
)

pytestmark = [pytest.mark.fault, pytest.mark.usefixtures("in_threads")]


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
