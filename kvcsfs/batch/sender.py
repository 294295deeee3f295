"""Sender: frames to one client, whole, with no more descriptors in flight than the client may leave unread."""

from __future__ import annotations

import array
import errno
import fcntl
import socket
from collections.abc import Callable, Sequence

import trio

from kvcsfs import wire
from kvcsfs.errors import ProtocolError
from kvcsfs.locks import Lock

FDS_IN_FLIGHT = 256  # of one connection: they count against its user's limit, not against the process
_SIOCOUTQ = 0x5411  # bytes the peer hasn't read, unix(7)


class Sender:
    """The sending side of a connection's socket. The connection closes it."""

    def __init__(self, client: socket.socket) -> None:
        self._socket = client
        self._turn = Lock()
        self._in_flight = 0  # descriptors sent since the client had surely read all

    async def send(
        self, reply: wire.Message, fds: Sequence[int] = (), still_valid: Callable[[], bool] = lambda: True
    ) -> None:
        """Send one frame whole, its descriptors on its first byte."""
        frame = wire.encode(reply)
        async with self._turn:
            if fds:
                await self._descriptors_taken(len(fds))
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            view = memoryview(frame)
            while view:
                if control and not still_valid():
                    raise ProtocolError("the lease was released before it was sent whole")
                try:
                    sent = self._socket.sendmsg([view], control, socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(self._socket)
                    continue
                except OSError as exc:
                    if exc.errno != errno.ETOOMANYREFS:
                        raise
                    # Descriptors in flight count against the user: others must take theirs.
                    await trio.sleep(0.01)
                    continue
                view = view[sent:]
                control = []
            self._in_flight += len(fds)

    async def _descriptors_taken(self, count: int) -> None:
        """Wait until the client has read so much that `count` more descriptors may be in flight."""
        pause = 0.0005
        while self._in_flight and self._in_flight + count > FDS_IN_FLIGHT:
            unread = fcntl.ioctl(self._socket, _SIOCOUTQ, b"\0\0\0\0")
            if unread == b"\0\0\0\0":
                self._in_flight = 0
                return
            await trio.sleep(pause)
            pause = min(1.1 * pause, 0.1)  # a client that never reads is looked at ever less
