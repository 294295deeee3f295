"""Clients that go in the middle, keys and reservations that go, and a stop: what was begun ends well."""

from __future__ import annotations

import fcntl
import os
import socket

import pytest
import trio
import trio.testing

from kvcsfs import wire
from kvcsfs.batch.face import BatchFace
from kvcsfs.batch.requests import TTL_GRACE_SECONDS
from kvcsfs.batch.sender import Sender
from tests.faces.served import nothing_held, serving, with_client
from tests.rawclient import RawClient
from tests.stores import Gate, checksum, config, keys, running, values


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
