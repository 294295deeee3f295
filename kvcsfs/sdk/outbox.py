"""The sending side of a connection: frames go out whole and in order, and nobody waits past a deadline."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvcsfs.errors import KvcsError, KvcsUnavailableError
from kvcsfs.sdk.deadline import Deadline


class Owner(Protocol):
    """The connection, as its outbox sees it."""

    def raise_error(self) -> None: ...
    def fail(self, error: KvcsError) -> None: ...
    def close_if_idle(self) -> None: ...


class Outbox:
    """Invariant: `lock` is held by whoever is in a call on the socket; whoever releases it looks at `_posted` again."""

    def __init__(
        self, sock: socket.socket, spawn: Callable[[Callable[[], None]], None], owner: Owner
    ) -> None:
        self._sock, self._spawn, self._owner = sock, spawn, owner
        self.lock = threading.Lock()
        self._unsent = bytearray()  # what the socket could not take, at most one frame torn; goes first
        self._posted: deque[bytearray] = deque()  # one-way frames
        self._flushing = False
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)

    def send(self, frame: bytearray, deadline: Deadline) -> int:
        """Send a frame after what waits before it; return how many of its bytes are unsent when the deadline passes.

        If all are, it is taken back; the rest of a torn one goes out with the next message.
        """
        if not self.lock.acquire(timeout=deadline.lock_seconds()):
            return len(frame)
        try:
            self._collect()
            self._unsent += frame
            if self._flush(deadline):
                return 0
            left = min(len(frame), len(self._unsent))
            if left == len(frame):
                del self._unsent[-left:]
            return left
        except KvcsError:
            raise
        except BaseException:
            self._owner.fail(
                KvcsUnavailableError("the connection was interrupted")
            )  # nobody knows what was sent
            raise
        finally:
            self.lock.release()
            self._send_posted()
            self._owner.close_if_idle()

    def post(self, frame: bytearray) -> None:
        """Send a one-way frame without waiting: what the socket can't take now goes before anything else."""
        self._posted.append(frame)
        self._send_posted()

    def _send_posted(self) -> None:
        while self._posted and self.lock.acquire(blocking=False):
            try:
                self._collect()
                sent = self._flush(Deadline(0))
            except KvcsError:
                sent = True  # dead: nothing goes out any more
            finally:
                self.lock.release()
            if not sent and not self._flushing:
                self._flushing = True
                self._spawn(self._flush_later)

    def _flush_later(self) -> None:
        with contextlib.suppress(KvcsError), self.lock:
            self._flushing = False
            self._collect()
            self._flush(Deadline())
        self._send_posted()
        self._owner.close_if_idle()

    def _collect(self) -> None:
        while self._posted:
            self._unsent += self._posted.popleft()

    def _flush(self, deadline: Deadline) -> bool:
        """Send what is unsent; the caller holds the lock."""
        while self._unsent:
            self._owner.raise_error()
            try:
                del self._unsent[: self._sock.send(self._unsent, socket.MSG_NOSIGNAL)]
            except BlockingIOError:
                if not self._writable.poll(deadline.poll_ms()):
                    return False
            except OSError as exc:
                self._owner.fail(
                    KvcsUnavailableError(f"the connection to the daemon broke: {os.strerror(exc.errno or 0)}")
                )
        return True
