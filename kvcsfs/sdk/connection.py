"""One connection to the daemon, used by any number of threads at once.

There is no reader thread. Of the threads that wait for a reply one leads: it reads the socket for all of them,
hands each its frames, and passes the lead on when its own are there. So a lone caller pays no thread switch for a
round trip.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvcsfs import wire
from kvcsfs.errors import KvcsError, KvcsTimeoutError, KvcsUnavailableError, ProtocolError
from kvcsfs.sdk.deadline import Deadline
from kvcsfs.sdk.outbox import Outbox

RECEIVE_BYTES = 256 << 10
# one group of descriptors to a recvmsg; the kernel never joins two (unix_stream_read_generic)
CONTROL_BYTES = socket.CMSG_SPACE(4 * wire.FDS_PER_FRAME) + socket.CMSG_SPACE(64)


def close_fds(fds: Sequence[int]) -> None:
    """Close received descriptors, a run of numbers in one system call: in a quiet process that is all of them."""
    if not fds:
        return
    fds = sorted(fds)
    first = end = fds[0]
    for fd in fds:
        if fd != end:
            os.closerange(first, end)
            first = fd
        end = fd + 1
    os.closerange(first, end)


class Frame:
    """One reply frame with its descriptors. `cut`: the kernel could not deliver all of them; none is kept."""

    __slots__ = ("cut", "fds", "reply")

    def __init__(self, reply: wire.Reply, fds: list[int], cut: bool) -> None:
        self.reply, self.fds, self.cut = reply, fds, cut


class Waiter:
    """A request whose reply is awaited. `bell` is held, and released by whoever wakes the waiting thread."""

    __slots__ = ("bell", "id", "inbox", "last", "orphan")

    def __init__(self, request_id: int) -> None:
        self.id = request_id
        self.inbox: deque[Frame] = deque()
        self.last = False  # its last frame was received
        self.orphan = False
        self.bell = threading.Lock()
        self.bell.acquire()


class Connection:
    """Invariants, under `_lock`: at most one thread leads; a waiter in `_parked` has a bell to ring; once `_error` is
    set nothing is sent or read, and the socket is closed as soon as no thread is inside a call on it."""

    def __init__(self, sock: socket.socket, spawn: Callable[[Callable[[], None]], None]) -> None:
        """`sock` is connected and non-blocking; `spawn` runs a job in a thread of its own."""
        self._sock, self._spawn = sock, spawn
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._error: KvcsError | None = None
        self._waiters: dict[int, Waiter] = {}
        self._orphans = 0
        self._parked: dict[Waiter, None] = {}
        self._leading = self._draining = False
        self._frames = wire.FrameBuffer()
        self._buffer = bytearray(RECEIVE_BYTES)
        self._groups: deque[tuple[list[int], bool]] = deque()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._outbox = Outbox(sock, spawn, self)

    @property
    def alive(self) -> bool:
        return self._error is None

    def next_id(self) -> int:
        return next(self._ids)

    # -- requests

    def request(self, message: wire.Request, deadline: Deadline) -> Waiter:
        """Send a request whose id is from `next_id`.

        Raises:
            KvcsTimeoutError: it could not be sent in time. KvcsUnavailableError: the connection is dead.
        """
        frame = wire.encode(message)
        waiter = Waiter(message.id)
        with self._lock:
            self.raise_error()
            self._waiters[waiter.id] = waiter
        unsent = self._outbox.send(frame, deadline)
        if unsent:
            if unsent == len(frame):
                with self._lock:
                    self._waiters.pop(waiter.id, None)
            self.abandon(waiter)
            raise KvcsTimeoutError("the daemon did not take the request before the deadline")
        return waiter

    def next_frame(self, waiter: Waiter, deadline: Deadline) -> Frame:
        """Wait for the waiter's next frame.

        Raises:
            KvcsTimeoutError: the caller must `abandon` it. KvcsUnavailableError: the connection died.
        """
        if not self._await(waiter, lambda: bool(waiter.inbox), deadline):
            raise KvcsTimeoutError("no reply before the deadline")
        return waiter.inbox.popleft()

    def abandon(self, waiter: Waiter) -> bool:
        """Stop waiting; return whether a frame is still to come. What it brings is given back when it is here."""
        with self._lock:
            waiter.orphan = owed = not waiter.last and self._error is None and waiter.id in self._waiters
            drain = owed and not self._draining
            self._orphans += owed
            self._draining |= drain
            frames, waiter.inbox = waiter.inbox, deque()
        for frame in frames:
            self._give_back(frame, release=not owed)
        if drain:
            self._spawn(self._drain)
        return owed

    def _drain(self) -> None:
        """Read until no reply is owed to a call that gave up, so that no descriptor waits in the socket."""
        with contextlib.suppress(KvcsError):
            while self._await(Waiter(0), lambda: self._orphans == 0, Deadline()):
                with self._lock:
                    if self._orphans == 0:
                        self._draining = False
                        return

    # -- reading

    def _await(self, waiter: Waiter, ready: Callable[[], bool], deadline: Deadline) -> bool:
        """Lead or wait until `ready`; False when the deadline passed first."""
        while True:
            with self._lock:
                if ready():
                    self._wake_a_leader()
                    return True
                self.raise_error()
                lead = not self._leading
                if lead:
                    self._leading = True
                else:
                    self._parked[waiter] = None
            if lead:
                return self._lead(ready, deadline)
            if not waiter.bell.acquire(timeout=deadline.lock_seconds()) and self._unpark(waiter):
                return False

    def _lead(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        try:
            while not ready():
                if not self._read(deadline):
                    return False
            return True
        except KvcsError as exc:
            self.fail(exc)
            self.raise_error()  # the first reason: close() ends the connection too
            raise
        except BaseException:
            self.fail(KvcsUnavailableError("the connection was interrupted"))  # what was read may be lost
            raise
        finally:
            with self._lock:
                self._leading = False
                self._wake_a_leader()
            self.close_if_idle()

    def _unpark(self, waiter: Waiter) -> bool:
        """Give up waiting for the bell; False if it rang in this moment, and was meant for us."""
        with self._lock:
            if waiter in self._parked:
                del self._parked[waiter]
                return True
        waiter.bell.acquire()
        return False

    def _wake_a_leader(self) -> None:
        if not self._leading and self._parked:
            self._wake(next(iter(self._parked)))

    def _wake(self, waiter: Waiter) -> None:
        if waiter in self._parked:
            del self._parked[waiter]
            waiter.bell.release()

    def _read(self, deadline: Deadline) -> bool:
        """Read once and hand out what came; False when nothing came before the deadline."""
        if not self._readable.poll(deadline.poll_ms()):
            return False
        try:
            size, control, flags, _ = self._sock.recvmsg_into(
                [self._buffer], CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return True
        except OSError as exc:
            raise KvcsUnavailableError(
                f"the connection to the daemon broke: {os.strerror(exc.errno or 0)}"
            ) from None
        self._take_fds(control, flags)
        if not size:
            raise KvcsUnavailableError("the daemon closed the connection")
        try:
            for payload in self._frames.feed(memoryview(self._buffer)[:size]):
                self._hand_out(wire.decode_reply(payload))
        except ProtocolError as exc:
            raise KvcsUnavailableError(f"the daemon's answer can't be read: {exc.message}") from exc
        return True

    def _take_fds(self, control: list[tuple[int, int, bytes]], flags: int) -> None:
        fds = array.array("i")
        for level, kind, data in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        cut = bool(flags & socket.MSG_CTRUNC)
        if cut:
            close_fds(fds)
            self._groups.append(([], True))
        elif fds:
            self._groups.append((fds.tolist(), False))

    def _claim(self, reply: wire.Reply) -> Frame:
        """Pair a reply with its descriptors: groups arrive in the order of the frames that announce them."""
        if isinstance(reply, wire.OpenReply):
            announced = len(reply.flags)
        elif isinstance(reply, wire.ReserveReply):
            announced = sum(token > 0 for token in reply.tokens)
        else:
            announced = 0
        if not announced:
            return Frame(reply, [], False)
        fds, cut = self._groups.popleft() if self._groups else ([], False)
        if not cut and len(fds) != announced:
            close_fds(fds)
            raise ProtocolError(f"a reply announces {announced} descriptors and brings {len(fds)}")
        return Frame(reply, fds, cut)

    def _hand_out(self, reply: wire.Reply) -> None:
        frame = self._claim(reply)
        if isinstance(reply, wire.Failure) and reply.id == 0:
            raise KvcsUnavailableError(f"the daemon ended the connection: {reply.message}")
        last = not (isinstance(reply, wire.OpenReply | wire.ReserveReply) and reply.more)
        with self._lock:
            waiter = self._waiters.pop(reply.id, None) if last else self._waiters.get(reply.id)
            if waiter is not None and not waiter.orphan:
                waiter.last = last
                waiter.inbox.append(frame)
                self._wake(waiter)
                return
            self._orphans -= waiter is not None and last
        self._give_back(frame, release=last)

    def _give_back(self, frame: Frame, release: bool) -> None:
        """Return what a frame that nobody waits for brought. A lease spans all frames: `release` with the last."""
        close_fds(frame.fds)
        if isinstance(frame.reply, wire.OpenReply) and frame.reply.lease and release:
            self.post(wire.Release(0, frame.reply.lease))
        elif isinstance(frame.reply, wire.ReserveReply):
            tokens = [token for token in frame.reply.tokens if token > 0]
            if tokens:
                self.post(wire.Abort(0, tokens))

    def post(self, message: wire.Request) -> None:
        """Send a one-way message without waiting; it goes out before any later one."""
        if self._error is None:
            self._outbox.post(wire.encode(message))
            self.close_if_idle()

    # -- the end

    def raise_error(self) -> None:
        if self._error is not None:
            raise type(self._error)(self._error.message)

    def fail(self, error: KvcsError) -> None:
        """Mark the connection dead and wake everybody; the first reason stays."""
        with self._lock:
            if self._error is None:
                self._error = error
            self._waiters.clear()
            self._orphans = 0
            for waiter in list(self._parked):
                self._wake(waiter)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # whoever is in poll() comes back
        self.close_if_idle()

    def close_if_idle(self) -> None:
        """Close the socket once dead and nobody is in a call on it: its number may be another file's a moment later."""
        if self._error is None or not self._outbox.lock.acquire(blocking=False):
            return
        try:
            with self._lock:
                if self._leading:
                    return
                self._sock.close()
                while self._groups:
                    close_fds(self._groups.popleft()[0])
        finally:
            self._outbox.lock.release()

    def forget(self) -> None:
        """In a forked child: drop the copy of the socket; the parent's connection is not touched."""
        self._error = KvcsUnavailableError("the connection belongs to the parent process")
        self._sock.close()
