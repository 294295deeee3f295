"""The protocol and the socket itself, with a client that keeps no rules unless it wants to."""

from __future__ import annotations

import errno
import socket
import stat
import struct

import msgspec
import pytest

from kvcsfs import wire
from kvcsfs.batch.face import listen
from kvcsfs.errors import ConfigError
from tests.faces.served import nothing_held, serving, with_client
from tests.rawclient import RawClient

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
