"""A plain client for the command line: one request, one answer, no descriptors."""

from __future__ import annotations

import os
import socket
from typing import Self, TypeVar

from kvcsfs import wire
from kvcsfs.config import DEFAULT_SOCKET
from kvcsfs.errors import KvcsError, KvcsTimeoutError, KvcsUnavailableError

TIMEOUT_SECONDS = 30.0
R = TypeVar("R", bound=wire.Message)


def default_socket() -> str:
    """The socket path of $KVCS_SOCKET, else the default."""
    return os.environ.get("KVCS_SOCKET") or DEFAULT_SOCKET


class Control:
    """A connection to a daemon.

    Raises KvcsUnavailableError, KvcsTimeoutError; KvcsError for what the daemon refuses.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._frames = wire.FrameBuffer()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(TIMEOUT_SECONDS)
        try:
            self._socket.connect(path)
        except OSError as exc:
            self._socket.close()
            raise KvcsUnavailableError(f"no daemon answers at {path}: {exc.strerror or exc}") from exc
        try:
            hello = wire.Hello(1, wire.PROTOCOL_VERSION, "kvcsfs command line", 0)
            self.hello = self.ask(hello, wire.HelloReply)
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()

    def ask(self, request: wire.Message, kind: type[R], seconds: float = TIMEOUT_SECONDS) -> R:
        """Send a request and return its reply, which must be of `kind` and come within `seconds`."""
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(wire.encode(request))
            while True:
                data = self._socket.recv(1 << 20)
                if not data:
                    raise KvcsUnavailableError(f"the daemon at {self._path} closed the connection")
                for payload in self._frames.feed(data):
                    reply = wire.decode_reply(payload)
                    if isinstance(reply, wire.Failure):
                        raise KvcsError(reply.message)
                    if not isinstance(reply, kind):
                        raise KvcsError(f"the daemon at {self._path} answered {type(reply).__name__}")
                    return reply
        except KvcsError:  # some of ours are OSErrors too
            raise
        except TimeoutError as exc:
            raise KvcsTimeoutError(f"the daemon at {self._path} did not answer in {seconds:.0f} s") from exc
        except OSError as exc:
            raise KvcsUnavailableError(f"the daemon at {self._path} went: {exc.strerror or exc}") from exc
