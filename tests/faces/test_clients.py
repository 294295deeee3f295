"""Clients that do harm, by accident or on purpose: they are shut out, and nobody else notices."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest
import trio

from kvcsfs import wire
from kvcsfs.batch import connection, face
from tests.faces.served import serving
from tests.rawclient import RawClient

VALUE = b"x" * 5000


def connected(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(path / "sock"))  # waits while the backlog is full, which with a timeout it would not
    client.settimeout(10)
    return client


def is_cut_off(client: socket.socket) -> bool:
    """Whether the daemon has closed; what it said before is dropped."""
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def works(path: Path) -> None:
    with RawClient(path / "sock") as good:
        assert good.put("good", VALUE) == 0
        assert good.get("good") == VALUE


async def test_one_users_connections_do_not_keep_others_out(tmp_path, monkeypatch):
    monkeypatch.setattr(face, "MAX_USER_CONNECTIONS", 50)

    def script() -> None:
        clients = [RawClient(tmp_path / "sock") for _ in range(50)]
        with RawClient(tmp_path / "sock", hello=False) as one_more:
            failure, _ = one_more.receive()
            assert isinstance(failure, wire.Failure)
            assert (failure.id, failure.errno) == (0, errno.EMFILE)
            assert "too many connections" in failure.message
            with pytest.raises(EOFError):
                one_more.receive()
        assert clients[7].put("k", VALUE) == 0
        clients.pop().close()
        while True:  # its place is free as soon as the daemon has noticed
            with RawClient(tmp_path / "sock", hello=False) as client:
                client.send(wire.Hello(1, 1, "raw", 1))
                if isinstance(client.receive()[0], wire.HelloReply):
                    break
        for client in clients:
            client.close()

    async with serving(tmp_path):
        await trio.to_thread.run_sync(script)


async def test_thousands_of_connections_in_a_row_leave_nothing(tmp_path):
    def descriptors() -> int:
        """Our own and the daemon's, which are of one process here, with one client connected."""
        with RawClient(tmp_path / "sock") as good:
            while good.status()["sessions"] > 1:
                pass
            return len(os.listdir("/proc/self/fd"))

    def script() -> None:
        works(tmp_path)
        works(tmp_path)  # the slot that it replaced keeps a descriptor, too
        before = descriptors()
        for i in range(3000):
            client = connected(tmp_path)
            if i % 3 == 1:
                client.sendall(b"\xff" * 100)
            if i % 3 == 2:
                client.sendall(wire.encode(wire.Hello(1, 1, "raw", 1)) + b"\x10\0\0\0half")
            client.close()
        works(tmp_path)
        assert descriptors() <= before

    async with serving(tmp_path):
        await trio.to_thread.run_sync(script)


@pytest.mark.parametrize("sent", [b"", b"\x10", b"\x10\0\0\0abc"])
async def test_who_never_says_hello_is_cut_off(tmp_path, monkeypatch, sent):
    monkeypatch.setattr(connection, "HELLO_SECONDS", 0.1)

    def script() -> None:
        with connected(tmp_path) as silent:
            silent.sendall(sent)
            assert is_cut_off(silent)
        works(tmp_path)

    async with serving(tmp_path):
        await trio.to_thread.run_sync(script)


async def test_half_a_frame_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "FRAME_SECONDS", 0.1)

    def script() -> None:
        with RawClient(tmp_path / "sock") as idle, RawClient(tmp_path / "sock") as half:
            half.socket.sendall(wire.encode(wire.Query(2, 0, ["k"]))[:-1])
            assert is_cut_off(half.socket)
            assert idle.get("none") is None, "to be idle between frames is fine"

    async with serving(tmp_path):
        await trio.to_thread.run_sync(script)


async def test_a_large_first_frame_is_refused_before_it_is_held(tmp_path):
    def script() -> None:
        with connected(tmp_path) as client:
            client.sendall((wire.MAX_FRAME_BYTES).to_bytes(4, "little"))
            assert is_cut_off(client)

    async with serving(tmp_path):
        await trio.to_thread.run_sync(script)


async def test_clients_that_never_read_cost_a_bounded_amount(tmp_path):
    """Each asks until the daemon reads no more of it; the good one is served, and a stop doesn't wait for them."""

    def script() -> None:
        works(tmp_path)
        deaf = [RawClient(tmp_path / "sock") for _ in range(5)]
        asked = bytes(wire.encode(wire.Status(2)) + wire.encode(wire.Query(3, 0, ["good"] * 500)))
        for client in deaf:
            client.socket.setblocking(False)
            sent = 0
            with pytest.raises(BlockingIOError):
                while sent < 64 << 20:
                    sent += client.socket.send(asked * 50)
            assert sent < 8 << 20
        works(tmp_path)
        for client in deaf:
            client.close()

    async with serving(tmp_path) as engine:
        await trio.to_thread.run_sync(script)
        with trio.fail_after(5):
            while engine.status()["sessions"]:
                await trio.sleep(0.001)
