"""The way to the daemon: connects when needed, and anew after a restart; holds what calls share."""

from __future__ import annotations

import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator

import kvcsfs
from kvcsfs import wire
from kvcsfs.errors import KvcsClosedError, KvcsError, KvcsTimeoutError, KvcsUnavailableError
from kvcsfs.sdk.connection import Connection, Frame, Waiter
from kvcsfs.sdk.deadline import Deadline
from kvcsfs.sdk.gates import Gate
from kvcsfs.sdk.transfer import Transfer

BLOCK_BYTES = 4096  # what a value is charged beyond its size: padding to a block, and one for the footer


def charged_bytes(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES + BLOCK_BYTES


class Link:
    """A connection that said hello, with what the daemon told of itself."""

    def __init__(self, connection: Connection, hello: wire.HelloReply) -> None:
        self.connection, self.hello = connection, hello
        self._mountpoints = {point.index: point for point in hello.mountpoints}
        # One connection may reserve at most a quarter of the capacity.
        self._gates = {point.index: Gate(max(1, point.capacity // 4)) for point in hello.mountpoints}

    def mountpoint(self, index: int) -> wire.MountpointInfo | None:
        """What is known of a mountpoint; None if the daemon has none of this index."""
        return self._mountpoints.get(0 if self.hello.backend == "direct" else index)

    def gate(self, index: int) -> Gate | None:
        return self._gates.get(0 if self.hello.backend == "direct" else index)


class Exchange:
    """A request that was sent, the link it went over, and the first frame of its reply."""

    __slots__ = ("connection", "first", "link", "waiter")

    def __init__(self, link: Link, waiter: Waiter, first: Frame) -> None:
        self.link, self.connection, self.waiter, self.first = link, link.connection, waiter, first

    def frames(self, deadline: Deadline) -> Iterator[Frame]:
        """Yield every frame of the reply; the caller owns their descriptors."""
        yield self.first
        while not self.waiter.last or self.waiter.inbox:
            yield self.connection.next_frame(self.waiter, deadline)


class Channel:
    def __init__(
        self, path: str, connect_seconds: float, spawn: Callable[[Callable[[], None]], None]
    ) -> None:
        self._path, self._connect_seconds, self._spawn = path, connect_seconds, spawn
        self._link: Link | None = None
        self._connect_lock = threading.Lock()
        self._closed = ""  # why, once it is
        self.max_fds = max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self.fds = Gate(self.max_fds)
        self.transfers: set[Transfer] = set()  # that hold descriptors

    def check_open(self) -> None:
        if self._closed:
            raise KvcsClosedError(self._closed)

    def link(self, deadline: Deadline) -> Link:
        """The live connection, made if there is none.

        Raises:
            KvcsUnavailableError: nobody answers. KvcsTimeoutError: the deadline passed before that was known.
        """
        link = self._link
        if link is not None and link.connection.alive:
            return link
        if not self._connect_lock.acquire(timeout=deadline.lock_seconds()):
            raise KvcsTimeoutError("no connection to the daemon before the deadline")
        try:
            if self._link is None or not self._link.connection.alive:
                self.check_open()
                self._link = self._connect(deadline)
                if self._closed:  # by another thread meanwhile
                    self.close()
            return self._link
        finally:
            self._connect_lock.release()

    def exchange(self, make: Callable[[Link, int], wire.Request], deadline: Deadline) -> Exchange:
        """Send a request and wait for the first frame of its reply.

        `make` builds it for a link and an id. A connection that was there before and turns out dead before any byte of
        the reply (the daemon restarted) is replaced once. Raises as `link` does.
        """
        before = self._link
        try:
            return self._exchange(make, deadline)
        except KvcsUnavailableError:
            if before is None or before is not self._link or self._closed:
                raise
        return self._exchange(make, deadline)

    def _exchange(self, make: Callable[[Link, int], wire.Request], deadline: Deadline) -> Exchange:
        link = self.link(deadline)
        connection = link.connection
        waiter = connection.request(make(link, connection.next_id()), deadline)
        try:
            return Exchange(link, waiter, connection.next_frame(waiter, deadline))
        except BaseException:  # Ctrl-C as well: what comes later is given back
            connection.abandon(waiter)
            raise

    # -- connecting

    def _connect(self, deadline: Deadline) -> Link:
        patience = deadline.sooner(self._connect_seconds)
        try:
            return self._greet(self._dial(patience), patience)
        except KvcsTimeoutError:
            if deadline.passed():
                raise
            raise KvcsUnavailableError(
                f"the daemon at {self._path} did not answer within {self._connect_seconds:g} s"
            ) from None

    def _dial(self, deadline: Deadline) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            while (failure := sock.connect_ex(self._path)) == errno.EAGAIN:  # its backlog is full, unix(7)
                if deadline.passed():
                    raise KvcsTimeoutError("the daemon takes no connections")
                time.sleep(0.005)
        except BaseException:
            sock.close()
            raise
        if failure:
            sock.close()
            raise KvcsUnavailableError(f"no daemon at {self._path}: {os.strerror(failure)}")
        return sock

    def _greet(self, sock: socket.socket, deadline: Deadline) -> Link:
        connection = Connection(sock, self._spawn)
        try:
            hello = wire.Hello(
                connection.next_id(),
                wire.PROTOCOL_VERSION,
                f"kvcsfs-python/{kvcsfs.__version__}",
                self.max_fds,
            )
            reply = connection.next_frame(connection.request(hello, deadline), deadline).reply
            if isinstance(reply, wire.Failure):
                raise KvcsUnavailableError(f"the daemon at {self._path} refused: {reply.message}")
            if not isinstance(reply, wire.HelloReply) or reply.version != wire.PROTOCOL_VERSION:
                raise KvcsUnavailableError(
                    f"the daemon at {self._path} speaks another version of the protocol"
                )
            return Link(connection, reply)
        except KvcsError as exc:
            connection.fail(exc)
            raise

    # -- the end

    def close(self) -> None:
        self._closed = "the client is closed"
        link = self._link
        if link is not None:
            link.connection.fail(KvcsClosedError(self._closed))

    def forget(self) -> None:
        """In a forked child: every further call says so, and the parent's connection is left alone."""
        self._closed = "the client belongs to the parent process: make a new one after a fork"
        if self._link is not None:
            self._link.connection.forget()
        for transfer in self.transfers:
            transfer.forget()
