"""A client of the socket that does as it is told: one request at a time, blocking, no rules kept for it."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from kvcsfs import wire
from tests.stores import checksum

R = TypeVar("R", bound=wire.Message)
Sliced = TypeVar("Sliced", wire.OpenReply, wire.ReserveReply)


class RawClient:
    """One connection. Use it from a thread when the daemon runs in this process."""

    def __init__(self, path: Path, hello: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(str(path))  # waits while the backlog is full, which with a timeout it would not
        self.socket.settimeout(10)
        self._data = bytearray()
        self._fds: list[int] = []
        self._ids = 1
        if hello:
            self.hello = self.ask(wire.Hello(1, wire.PROTOCOL_VERSION, "raw", 1024), wire.HelloReply)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, message: wire.Message) -> None:
        self.socket.sendall(wire.encode(message))

    def receive(self) -> tuple[wire.Reply, list[int]]:
        """The next reply and the descriptors that came with its first byte. EOFError when the daemon closed."""
        while not (frame := self._cut()):
            room = socket.CMSG_SPACE(4 * wire.FDS_PER_FRAME)
            data, control, flags, _ = self.socket.recvmsg(1 << 16, room, socket.MSG_CMSG_CLOEXEC)
            assert not flags & socket.MSG_CTRUNC
            for level, kind, content in control:
                assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
                self._fds += array.array("i", content)
            if not data:
                raise EOFError
            self._data += data
        fds, self._fds = self._fds, []
        return wire.decode_reply(frame), fds

    def _cut(self) -> bytes | None:
        size = int.from_bytes(self._data[:4], "little")
        if len(self._data) < 4 or len(self._data) < 4 + size:
            return None
        frame = bytes(self._data[4 : 4 + size])
        del self._data[: 4 + size]
        return frame

    def ask(self, message: wire.Message, kind: type[R]) -> R:
        """Send a request and return its one reply, which must be of `kind` and bring no descriptors."""
        self.send(message)
        reply, fds = self.receive()
        assert isinstance(reply, kind), reply
        assert not fds
        return reply

    def next_id(self) -> int:
        self._ids += 1
        return self._ids

    # -- whole exchanges

    def open(self, keys: Sequence[str]) -> tuple[list[wire.OpenReply], list[list[int]]]:
        """Every frame of an open, and the descriptors of each."""
        self.send(wire.Open(self.next_id(), 0, list(keys)))
        return self._frames(wire.OpenReply)

    def reserve(
        self, keys: Sequence[str], sizes: Sequence[int], ttl: float = 0.0
    ) -> tuple[list[wire.ReserveReply], list[list[int]]]:
        """Every frame of a reserve, and the descriptors of each."""
        self.send(wire.Reserve(self.next_id(), 0, list(keys), list(sizes), ttl_seconds=ttl))
        return self._frames(wire.ReserveReply)

    def _frames(self, kind: type[Sliced]) -> tuple[list[Sliced], list[list[int]]]:
        replies: list[Sliced] = []
        fds: list[list[int]] = []
        more = True
        while more:
            reply, came = self.receive()
            assert isinstance(reply, kind), reply
            replies.append(reply)
            fds.append(came)
            more = reply.more
        return replies, fds

    def put(self, key: str, value: bytes) -> int:
        """Store one value; its status."""
        (reply,), (fds,) = self.reserve([key], [len(value)])
        if not fds:
            return reply.tokens[0]
        os.pwrite(fds[0], value, 0)
        os.close(fds[0])
        return self.commit(reply.tokens, [value])[0]

    def commit(self, tokens: Sequence[int], contents: Sequence[bytes]) -> list[int]:
        """Commit tokens whose values these are."""
        sums = b"".join(map(checksum, contents))
        return self.ask(wire.Commit(self.next_id(), list(tokens), sums), wire.CommitReply).statuses

    def get(self, key: str) -> bytes | None:
        """Read one value; None for a miss."""
        (reply,), (fds,) = self.open([key])
        if not fds:
            assert reply.sizes == [0]
            return None
        value = os.pread(fds[0], reply.sizes[0], 0)
        os.close(fds[0])
        self.send(wire.Release(0, reply.lease))
        return value

    def status(self) -> dict[str, Any]:
        """Figures of mountpoint 0, with those of the daemon."""
        status = self.ask(wire.Status(self.next_id()), wire.StatusReply).status
        return {**status, **status["mountpoints"][0]}
