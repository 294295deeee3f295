"""The batch face over a real socket, with a client that keeps no rules unless it wants to."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import stat
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing

from kvcsfs import wire
from kvcsfs.batch.face import BatchFace, listen
from kvcsfs.batch.requests import TTL_GRACE_SECONDS
from kvcsfs.batch.sender import Sender
from kvcsfs.engine import jobs
from kvcsfs.engine.engine import Engine
from kvcsfs.engine.store import SlotStore
from kvcsfs.errors import ConfigError
from tests.rawclient import RawClient
from tests.stores import Gate, bytes_on_disk, checksum, config, keys, path_of, running, values


@asynccontextmanager
async def serving(path: Path, capacity: int = 64 << 20) -> AsyncIterator[Engine]:
    """An engine with its socket at `path / "sock"`."""
    settings = config(path, capacity)
    async with running(settings) as engine, trio.open_nursery() as nursery:
        face = BatchFace(engine, settings.socket)
        nursery.start_soon(face.serve)
        yield engine
        face.stop()


async def with_client(path: Path, script: Callable[[RawClient], object]) -> None:
    """Run a script of blocking calls in a thread, with a client of its own."""

    def run() -> None:
        with RawClient(path / "sock") as client:
            script(client)

    await trio.to_thread.run_sync(run)


async def nothing_held(engine: Engine) -> None:
    """Wait until no lease, reservation or pin is left; a staged file would be counted too."""
    volume = engine.volumes[0]
    with trio.fail_after(5):
        while True:
            status = engine.status()
            held = (
                status["leases"],
                status["reservations"],
                volume.catalog.pinned,
                volume.catalog.ledger.reserved,
            )
            if held == (0, 0, 0, 0) and not volume.catalog.retired:
                break
            await trio.sleep(0.001)
    assert bytes_on_disk(volume.config.path) == volume.catalog.ledger.used


# -- hello and what breaks the protocol


async def test_hello(tmp_path):
    def script(client: RawClient) -> None:
        hello = client.hello
        assert (hello.version, hello.backend, hello.max_keys) == (1, "direct", 1024)
        assert hello.server.startswith("kvcsfs ")
        assert [(m.index, m.capacity) for m in hello.mountpoints] == [(0, 64 << 20)]

    async with serving(tmp_path):
        await with_client(tmp_path, script)


def frame(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def pack(*items: object) -> bytes:
    return frame(msgspec.msgpack.encode(list(items)))


HELLO = bytes(wire.encode(wire.Hello(1, 1, "raw", 1)))


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (pack("hello", 1, 2, "raw", 1), "protocol version 2, expected 1"),
        (pack("query", 1, 0, ["a"]), "the first request must be hello"),
        (HELLO + HELLO, "hello was said already"),
        (frame(b"\xc1garbage"), "no request"),
        (frame(b""), "no request"),
        (HELLO + pack("query", 1, 0, "not a list"), "no request"),
        (HELLO + pack("query_reply"), "no request"),
        (struct.pack("<I", wire.MAX_FRAME_BYTES + 1) + b"x" * 100, "over the limit"),
        (b"GET / HTTP/1.1\r\n\r\n", "over the limit"),
    ],
)
async def test_who_breaks_the_protocol_is_told_and_cut_off_alone(tmp_path, sent, message):
    def script(good: RawClient) -> None:
        assert good.put("k", b"x") == 0
        with RawClient(tmp_path / "sock", hello=False) as bad:
            bad.socket.sendall(sent)
            reply, _ = bad.receive()
            if isinstance(reply, wire.HelloReply):
                reply, _ = bad.receive()
            assert isinstance(reply, wire.Failure)
            assert (reply.id, reply.errno) == (0, errno.EPROTO)
            assert message in reply.message
            with pytest.raises((EOFError, ConnectionResetError)):
                bad.receive()
        assert good.get("k") == b"x"

    async with serving(tmp_path):
        await with_client(tmp_path, script)


async def test_an_unknown_request_is_answered_and_the_connection_goes_on(tmp_path):
    def script(client: RawClient) -> None:
        client.socket.sendall(pack("teleport", 77, "x"))
        reply, _ = client.receive()
        assert isinstance(reply, wire.Failure)
        assert (reply.id, reply.errno) == (77, errno.EOPNOTSUPP)
        assert client.ask(wire.Query(3, 0, ["k"]), wire.QueryReply).sizes == [0]

    async with serving(tmp_path):
        await with_client(tmp_path, script)


async def test_frames_in_pieces_and_several_at_once(tmp_path):
    def script(client: RawClient) -> None:
        for byte in bytes(wire.encode(wire.Query(2, 0, ["k"]))):
            client.socket.sendall(bytes([byte]))
        assert client.receive()[0] == wire.QueryReply(2, [0])
        many = b"".join(bytes(wire.encode(wire.Query(i, 0, ["k"]))) for i in range(3, 203))
        client.socket.sendall(many + many[:5])
        assert [client.receive()[0].id for _ in range(200)] == list(range(3, 203))

    async with serving(tmp_path) as engine:
        await with_client(tmp_path, script)
        await nothing_held(engine)


@pytest.mark.parametrize(
    "request_of",
    [
        lambda: wire.Query(5, 0, ["k"] * 1025),
        lambda: wire.Open(5, 0, ["k"] * 1025),
        lambda: wire.Reserve(5, 0, ["a", "b"], [1]),
        lambda: wire.Reserve(5, 0, ["a"], [1], "perhaps"),
        lambda: wire.Commit(5, [1], b"short"),
        lambda: wire.Commit(5, [1], bytes(16), "perhaps"),
    ],
)
async def test_a_wrong_request_fails_alone(tmp_path, request_of):
    def script(client: RawClient) -> None:
        failure = client.ask(request_of(), wire.Failure)
        assert (failure.id, failure.errno) == (5, errno.EINVAL)
        assert "expected" in failure.message
        assert client.put("k", b"x") == 0

    async with serving(tmp_path):
        await with_client(tmp_path, script)


@pytest.mark.usefixtures("in_threads")
async def test_a_fault_of_ours_fails_one_request(tmp_path, monkeypatch, expected_warnings):
    expected_warnings.append("Usage failed")

    async def broken(*_args: object) -> None:
        raise RuntimeError("a bug")

    def script(client: RawClient) -> None:
        failure = client.ask(wire.Usage(5, 0, ""), wire.Failure)
        assert (failure.errno, failure.message) == (errno.EIO, "internal error, see the daemon's log")
        assert client.put("k", b"x") == 0

    async with serving(tmp_path) as engine:
        monkeypatch.setattr(engine, "usage", broken)
        await with_client(tmp_path, script)


# -- batches and descriptors


async def test_the_answer_to_an_open_comes_in_frames_of_64_descriptors(tmp_path):
    contents = values([f"m/{i:03}" for i in range(300)], 600)
    names = list(contents)

    def script(client: RawClient) -> None:
        for start in (0, 150):
            part = names[start : start + 150]
            (reply,), (fds,) = client.reserve(part, [600] * 150)
            for name, fd in zip(part, fds, strict=True):
                os.pwrite(fd, contents[name], 0)
                os.close(fd)
            assert client.commit(reply.tokens, [contents[n] for n in part]) == [0] * 150
        asked = [*names[:100], "none", *names[100:]]
        replies, parts = client.open(asked)
        counts = [64, 64, 64, 64, 44]
        assert [len(f) for f in parts] == counts
        firsts = [(r.first, r.more, len(r.sizes)) for r in replies]
        assert firsts == [
            (0, True, 64),
            (64, True, 65),
            (129, True, 64),
            (193, True, 64),
            (257, False, 44),
        ]
        assert len({r.lease for r in replies}) == 1
        assert [len(r.checksums) for r in replies] == [16 * n for n in counts]
        assert replies[1].sizes[100 - 64] == 0
        sums = b"".join(r.checksums for r in replies)
        got = [os.pread(fd, 600, 0) for part in parts for fd in part]
        assert got == [contents[n] for n in names], "descriptor i belongs to hit i"
        assert sums == b"".join(checksum(contents[n]) for n in names)
        for fd in (fd for part in parts for fd in part):
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            os.close(fd)
        assert client.status()["leases"] == 1
        client.send(wire.Release(0, replies[0].lease))
        assert client.status()["leases"] == 0

    async with serving(tmp_path) as engine:
        await with_client(tmp_path, script)
        await nothing_held(engine)


async def test_a_reserve_of_300_keys_is_two_frames(tmp_path):
    contents = values([f"m/{i:03}" for i in range(300)], 600)

    def script(client: RawClient) -> None:
        sizes = [600] * 300
        sizes[0] = 0
        replies, parts = client.reserve(list(contents), sizes)
        assert [len(f) for f in parts] == [253, 46]
        assert [(r.first, r.more, len(r.tokens)) for r in replies] == [(0, True, 254), (254, False, 46)]
        assert replies[0].tokens[0] == -errno.EINVAL
        tokens = [t for r in replies for t in r.tokens if t > 0]
        written = list(contents.values())[1:]
        for value, fd in zip(written, (fd for part in parts for fd in part), strict=True):
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
            os.pwrite(fd, value, 0)
            os.close(fd)
        assert client.commit(tokens, written) == [0] * 299
        for name in ("m/001", "m/253", "m/254", "m/299"):
            assert client.get(name) == contents[name]

    async with serving(tmp_path) as engine:
        await with_client(tmp_path, script)
        await nothing_held(engine)


async def test_the_first_keys_of_a_long_reserve_can_be_committed_before_the_rest_is_sent(
    tmp_path, monkeypatch
):
    names, taken = [f"k{i}" for i in range(300)], Sender._descriptors_taken

    async def late(self: Sender, count: int) -> None:
        if count == 47:
            await trio.sleep(0.3)
        await taken(self, count)

    def script(client: RawClient) -> None:
        client.send(wire.Reserve(5, 0, names, [5] * 300))
        first, fds = client.receive()
        assert isinstance(first, wire.ReserveReply)
        assert first.more
        for fd in fds:
            os.pwrite(fd, b"value", 0)
            os.close(fd)
        client.send(wire.Commit(6, first.tokens, checksum(b"value") * len(fds)))
        (rest, fds), (committed, _) = client.receive(), client.receive()
        assert isinstance(rest, wire.ReserveReply)
        assert committed == wire.CommitReply(6, [0] * len(first.tokens))
        for fd in fds:
            os.close(fd)

    monkeypatch.setattr(Sender, "_descriptors_taken", late)
    async with serving(tmp_path) as engine:
        await with_client(tmp_path, script)
        await nothing_held(engine)


async def test_opening_and_reserving_nothing(tmp_path):
    def script(client: RawClient) -> None:
        assert client.open([]) == ([wire.OpenReply(2, 0, 0, [], b"", b"", False)], [[]])
        assert client.reserve([], []) == ([wire.ReserveReply(3, 0, [], False)], [[]])
        assert client.commit([], []) == []

    async with serving(tmp_path):
        await with_client(tmp_path, script)


async def test_statuses_of_a_batch(tmp_path):
    def script(client: RawClient) -> None:
        assert client.put("k", b"x" * 10) == 0
        (reply,), (fds,) = client.reserve(["", "x" * 1025, "m.tmp", "big"], [1, 1, 1, 64 << 20])
        assert fds == []
        assert reply.tokens == [-errno.EINVAL, -errno.ENAMETOOLONG, -errno.EINVAL, -errno.ENOSPC]
        client.send(wire.Reserve(9, 0, ["k"], [1], "error"))
        answer, _ = client.receive()
        assert answer == wire.ReserveReply(9, 0, [-errno.EEXIST], False)
        assert client.commit([12345], [b""]) == [-errno.ESTALE]
        assert client.ask(wire.Delete(9, 0, ["k", "none"]), wire.DeleteReply).statuses == [0, -errno.ENOENT]
        assert client.ask(wire.Check(9, 0, ["none"]), wire.CheckReply).statuses == [0]

    async with serving(tmp_path):
        await with_client(tmp_path, script)


async def test_abort_gives_everything_back(tmp_path):
    def script(client: RawClient) -> None:
        (reply,), (fds,) = client.reserve(["a", "b"], [5000, 5000])
        for fd in fds:
            os.close(fd)
        client.send(wire.Abort(0, reply.tokens))
        assert client.commit(reply.tokens, [b"", b""]) == [-errno.ESTALE] * 2

    async with serving(tmp_path) as engine:
        await with_client(tmp_path, script)
        await nothing_held(engine)
        assert await keys(engine) == []


async def test_the_requests_of_the_command_line(tmp_path):
    def script(client: RawClient) -> None:
        for key in ("a/1", "a/2", "b"):
            client.put(key, b"x" * 5000)
        assert client.ask(wire.Usage(2, 0, "a/"), wire.UsageReply) == wire.UsageReply(2, 2, 10000, 24576)
        page = client.ask(wire.List(3, 0, "a/", "", 1), wire.ListReply)
        assert ([e.key for e in page.entries], page.more) == (["a/1"], True)
        page = client.ask(wire.List(3, 0, "a/", "a/1", 1), wire.ListReply)
        assert ([(e.key, e.size, e.checksum) for e in page.entries], page.more) == (
            [("a/2", 5000, checksum(b"x" * 5000))],
            False,
        )
        assert client.ask(wire.Evict(4, 0, "", 1), wire.EvictReply) == wire.EvictReply(4, 1, 12288)
        assert client.ask(wire.Remove(5, 0, "a/"), wire.EvictReply) == wire.EvictReply(5, 1, 12288)
        assert client.status()["entries"] == 1

    async with serving(tmp_path):
        await with_client(tmp_path, script)


async def test_a_slow_client_is_not_waited_for_by_others(tmp_path):
    def script(client: RawClient) -> None:
        for i in range(3):
            client.put(f"k{i}", b"x" * 5000)
        with RawClient(tmp_path / "sock") as slow:
            for i in range(100):  # more answers with descriptors than may be in flight, none of them read
                slow.send(wire.Open(i + 2, 0, ["k0", "k1", "k2"]))
            assert client.get("k1") == b"x" * 5000

    async with serving(tmp_path) as engine:
        await with_client(tmp_path, script)
        await nothing_held(engine)


async def test_a_mountpoint_that_is_not_configured_fails_the_batch(tmp_path):
    settings = config(tmp_path, mountpoints=2, backend="pooled")

    def script(client: RawClient) -> None:
        assert (client.hello.backend, [m.index for m in client.hello.mountpoints]) == ("pooled", [0, 1])
        requests: list[wire.Message] = [
            wire.Query(5, 2, ["k"]),
            wire.Open(5, 2, ["k"]),
            wire.Reserve(5, -1, ["k"], [1]),
        ]
        requests += [wire.Delete(5, 1 << 40, ["k"]), wire.Usage(5, 2), wire.List(5, 2), wire.Evict(5, 2)]
        requests += [wire.Check(5, 2, ["k"]), wire.Remove(5, 2, "k")]
        for request in requests:
            failure = client.ask(request, wire.Failure)
            assert (failure.id, failure.errno) == (5, errno.ENODEV)
            assert "expected 0 to 1" in failure.message
        assert client.ask(wire.Query(6, 1, ["k"]), wire.QueryReply).sizes == [0]

    async with running(settings) as engine, trio.open_nursery() as nursery:
        face = BatchFace(engine, settings.socket)
        nursery.start_soon(face.serve)
        await with_client(tmp_path, script)
        face.stop()


async def test_what_an_unclean_stop_left_is_unproven_until_it_is_checked(tmp_path, expected_warnings):
    expected_warnings.append("dropped 1 entries with a wrong checksum")

    def store(client: RawClient) -> None:
        for key in ("good", "bad"):
            client.put(key, b"x" * 5000)

    def check(client: RawClient) -> None:
        (reply,), (fds,) = client.open(["bad", "none", "good"])
        assert reply.flags == bytes([wire.UNPROVEN] * 2)
        for fd in fds:
            os.close(fd)
        client.send(wire.Release(0, reply.lease))
        assert client.ask(wire.Check(9, 0, ["good", "bad", "none"]), wire.CheckReply).statuses == [5000, 0, 0]
        (reply,), (fds,) = client.open(["bad", "good"])
        assert (reply.sizes, reply.flags) == ([0, 5000], b"\0")
        os.close(fds[0])
        client.put("new", b"y")
        (reply,), (fds,) = client.open(["new"])
        assert reply.flags == b"\0"
        os.close(fds[0])

    async with serving(tmp_path) as engine:
        await with_client(tmp_path, store)
        shutil.copytree(tmp_path / "data0", tmp_path / "crash" / "data0")
    async with serving(tmp_path / "crash") as engine:
        (bad,) = await engine.query_many(0, ["bad"])
        assert bad is not None
        fd = os.open(path_of(tmp_path / "crash" / "data0", bad.slot), os.O_WRONLY)
        os.pwrite(fd, b"?", 77)
        os.close(fd)
        await with_client(tmp_path / "crash", check)


async def test_while_the_store_recovers_puts_are_refused_and_gets_miss(tmp_path):
    def script(client: RawClient) -> None:
        assert client.get("k") is None
        assert client.ask(wire.Query(5, 0, ["k"]), wire.QueryReply).sizes == [0]
        for request in (wire.Reserve(5, 0, ["k"], [1]), wire.Delete(5, 0, ["k"]), wire.Evict(5, 0)):
            assert client.ask(request, wire.Failure).errno == errno.EBUSY

    async with serving(tmp_path) as engine:
        engine.volumes[0].recovering = True
        await with_client(tmp_path, script)
        engine.volumes[0].recovering = False


@pytest.mark.usefixtures("in_threads")
async def test_an_object_that_can_not_be_opened_is_an_error_in_its_place(tmp_path, monkeypatch):
    contents = values(["a", "b", "c"])
    real = SlotStore.open_read

    def script(client: RawClient) -> None:
        for key, value in contents.items():
            client.put(key, value)
        trio.from_thread.run_sync(break_b)
        (reply,), (fds,) = client.open(["a", "b", "none", "c"])
        assert reply.sizes == [5000, -errno.EIO, 0, 5000]
        assert [os.pread(fd, 5000, 0) for fd in fds] == [contents["a"], contents["c"]]
        assert reply.checksums == checksum(contents["a"]) + checksum(contents["c"])
        for fd in fds:
            os.close(fd)

    def break_b() -> None:
        volume = engine.volumes[0]
        jobs.close_all(volume.descriptors.clear())
        slot = volume.catalog.index.get("b").slot

        def failing(self, wanted):
            if wanted == slot:
                raise OSError(errno.EIO, "Input/output error")
            return real(self, wanted)

        monkeypatch.setattr(SlotStore, "open_read", failing)

    async with serving(tmp_path) as engine:
        await with_client(tmp_path, script)
        await nothing_held(engine)


# -- clients that go


async def test_a_client_that_dies_in_mid_batch_leaves_nothing(tmp_path):
    contents = values([f"k{i}" for i in range(20)])

    def dying(client: RawClient) -> None:
        for key, value in contents.items():
            client.put(key, value)
        pid = os.fork()
        if pid == 0:  # a process of its own, killed with everything in its hands
            victim = RawClient(tmp_path / "sock")
            victim.open(list(contents))
            _, (fds,) = victim.reserve(["new1", "new2"], [5000, 5000])
            os.pwrite(fds[0], b"half", 0)
            victim.send(wire.Open(99, 0, list(contents)))
            os.kill(os.getpid(), 9)
        os.waitpid(pid, 0)

    async with serving(tmp_path) as engine:
        await with_client(tmp_path, dying)
        await nothing_held(engine)
        assert set(await keys(engine)) == set(contents)


@pytest.mark.usefixtures("in_threads")
async def test_a_commit_under_way_completes_when_its_client_goes(tmp_path, monkeypatch):
    sealing = Gate(monkeypatch, "seal_many")

    def leaving(client: RawClient) -> None:
        (reply,), (fds,) = client.reserve(["k", "j"], [5000, 10])
        for fd in fds:
            os.pwrite(fd, b"x" * 10, 0)
            os.close(fd)
        client.send(wire.Commit(9, reply.tokens, checksum(b"x") * 2))
        trio.from_thread.run(sealing.reached.wait)

    async with serving(tmp_path) as engine:
        await with_client(tmp_path, leaving)
        assert await keys(engine) == []
        await trio.testing.wait_all_tasks_blocked()
        sealing.go.set()
        await nothing_held(engine)
        assert await keys(engine) == ["j", "k"]


@pytest.mark.usefixtures("in_threads")
async def test_who_misses_a_key_that_leaves_waits_and_holds_up_no_other_request(tmp_path, monkeypatch):
    recycling = Gate(monkeypatch, "recycle_many")

    def filling(client: RawClient) -> None:
        assert [client.put(key, b"value") for key in ("k", "j")] == [0, 0]

    def asking(client: RawClient) -> None:
        client.send(wire.Query(91, 0, ["k"]))
        client.send(wire.Open(92, 0, ["k"]))
        try:
            assert client.get("j") == b"value"
        finally:
            trio.from_thread.run_sync(recycling.go.set)
        missed = [client.receive()[0] for _ in range(2)]
        assert wire.QueryReply(91, [0]) in missed
        assert wire.OpenReply(92, 0, 0, [0], b"", b"") in missed

    async with serving(tmp_path) as engine:
        await with_client(tmp_path, filling)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.evict, 0, "k", 0)
            await recycling.reached.wait()
            await with_client(tmp_path, asking)


async def test_a_client_that_leaves_descriptors_unread_is_seldom_looked_at(monkeypatch, autojump_clock):
    looks, look = 0, fcntl.ioctl

    def counted(*args: object) -> object:
        nonlocal looks
        looks += 1
        return look(*args)

    monkeypatch.setattr("kvcsfs.batch.sender.fcntl.ioctl", counted)
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        sender = Sender(near)
        fds = [far.fileno()] * 200
        await sender.send(wire.StatusReply(1, {}), fds)
        began = trio.current_time()
        with trio.move_on_after(60):
            await sender.send(wire.StatusReply(2, {}), fds)
        assert trio.current_time() - began == 60
        assert looks < 1000


async def test_a_reservation_outlives_its_deadline_by_the_grace(tmp_path):
    def script(client: RawClient) -> None:
        _, (fds,) = client.reserve(["k"], [5000], ttl=10.0)
        os.close(fds[0])
        trio.from_thread.run_sync(seen.append, trio.from_thread.run_sync(remaining))

    def remaining():
        (session,) = [s for s in engine._sessions if s.staged]
        (staged,) = session.staged.values()
        return staged.expires - trio.current_time()

    seen: list[float] = []
    async with serving(tmp_path) as engine:
        await with_client(tmp_path, script)
        assert 10 + TTL_GRACE_SECONDS - 5 < seen[0] <= 10 + TTL_GRACE_SECONDS


async def test_a_stop_answers_what_was_asked(tmp_path):
    settings = config(tmp_path)

    def script() -> None:
        with RawClient(tmp_path / "sock") as client:
            (reply,), (fds,) = client.reserve(["k"], [5])
            os.pwrite(fds[0], b"value", 0)
            os.close(fds[0])
            client.send(wire.Commit(9, reply.tokens, checksum(b"value")))
            trio.from_thread.run(stop)
            assert client.receive()[0] == wire.CommitReply(9, [0])
            with pytest.raises(EOFError):
                client.receive()

    async def stop() -> None:
        while not engine.status()["mountpoints"][0]["puts"]:
            await trio.lowlevel.checkpoint()
        face.stop()

    async with running(settings) as engine:
        async with trio.open_nursery() as nursery:
            face = BatchFace(engine, settings.socket)
            nursery.start_soon(face.serve)
            await trio.to_thread.run_sync(script)
        assert not settings.socket.exists()


async def test_a_stop_lets_every_answer_that_was_begun_go_out_whole(tmp_path):
    """Those that the reading task sends itself, too; and a client that reads nothing keeps no other from its own."""
    settings = config(tmp_path, 64 << 20)
    names = [f"k{i}" for i in range(300)]  # more descriptors than may be in flight

    def script() -> None:
        with RawClient(tmp_path / "sock") as deaf, RawClient(tmp_path / "sock") as client:
            for part in (names[:150], names[150:]):
                for name in part:
                    assert client.put(name, b"x") == 0
            for _, fds in (client.open(names) for _ in range(2)):  # the second finds every descriptor open
                for fd in (fd for part in fds for fd in part):
                    os.close(fd)
            for asking in (deaf, client):
                asking.send(wire.Open(99, 0, names))
            trio.from_thread.run(stop)
            replies, fds = client._frames(wire.OpenReply)
            assert [len(part) for part in fds] == [64, 64, 64, 64, 44]
            assert not replies[-1].more
            for fd in (fd for part in fds for fd in part):
                os.close(fd)
            with pytest.raises(EOFError):
                client.receive()

    async def stop() -> None:
        while engine.status()["leases"] < 4:
            await trio.sleep(0.001)
        face.stop()
        await trio.sleep(0.1)

    async with running(settings) as engine, trio.open_nursery() as nursery:
        face = BatchFace(engine, settings.socket)
        nursery.start_soon(face.serve)
        await trio.to_thread.run_sync(script)


# -- the socket file


def test_the_socket_has_mode_and_group_and_its_directory_is_made(tmp_path):
    path = tmp_path / "run" / "deeper" / "sock"
    with listen(path, "daemon"):
        status = path.stat()
        assert stat.S_ISSOCK(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == 0o660
        assert status.st_gid == 1


def test_a_stale_socket_is_replaced_and_a_live_one_refused(tmp_path):
    path = tmp_path / "sock"
    with listen(path, ""):
        with pytest.raises(ConfigError, match="a daemon answers there already") as caught:
            listen(path, "")
        assert "\n" not in str(caught.value)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert path.exists()
    with listen(path, ""), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


@pytest.mark.parametrize(
    ("prepare", "group", "message"),
    [
        (lambda p: p.write_text("x"), "", "something else is there"),
        (lambda p: p.mkdir(), "", "something else is there"),
        (lambda p: None, "no such group", "there is no group 'no such group'"),
    ],
)
def test_a_path_that_can_not_be_used_is_one_line(tmp_path, prepare, group, message):
    prepare(tmp_path / "sock")
    with pytest.raises(ConfigError, match=message) as caught:
        listen(tmp_path / "sock", group)
    assert "\n" not in str(caught.value)


def test_a_directory_that_can_not_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="File exists"):
        listen(tmp_path / "file" / "sock", "")
