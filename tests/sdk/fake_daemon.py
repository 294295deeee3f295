"""A daemon in a thread of the test process, small and able to misbehave: real socket, real files, real descriptors."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import TypeVar

from xxhash import xxh3_128_digest

from kvcsfs import wire

M = TypeVar("M", bound=wire.Message)


class FakeDaemon:
    """Set the attributes to make it misbehave; `seen` holds every request in order."""

    def __init__(
        self, directory: Path, *, capacity: int = 1 << 30, in_memory: bool = False, backend: str = "direct"
    ) -> None:
        self.directory, self.path = directory, str(directory / "daemon.sock")
        self.points = [wire.MountpointInfo(0, capacity, in_memory)]
        self.backend = backend
        self.files: dict[str, tuple[Path, int, bytes]] = {}  # key -> file, size, checksum
        self.reserved: dict[int, tuple[str, Path, int]] = {}
        self.flags = 0
        self.open_flags = 0
        self.per_frame = wire.FDS_PER_FRAME
        self.silent: set[type] = set()  # requests that get no answer until `resume`
        self.resume = threading.Event()
        self.dies_on: set[type] = set()  # requests that end the connection
        self.garbage_on: set[type] = set()
        self.fails: dict[type, int] = {}  # requests that fail with this errno
        self.statuses: dict[str, int] = {}  # what a key gets, whatever it holds
        self.max_keys = wire.MAX_KEYS
        self.version = wire.PROTOCOL_VERSION
        self.seen: list[wire.Request] = []
        self.changed = threading.Condition()
        self._tokens = iter(range(1, 1 << 40))
        self._listener: socket.socket | None = None
        self._connections: set[socket.socket] = set()
        self.start()

    # -- life

    def start(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(16)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def stop(self) -> None:
        self.resume.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for sock in list(self._connections):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                self._connections.add(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        frames = wire.FrameBuffer()
        with sock, contextlib.suppress(OSError):
            while data := sock.recv(1 << 16):
                for payload in frames.feed(data):
                    request = wire.decode_request(payload)
                    with self.changed:
                        self.seen.append(request)
                        self.changed.notify_all()
                    if type(request) in self.dies_on:
                        return
                    if type(request) in self.silent:
                        self.resume.wait()
                    self._answer(sock, request)
        self._connections.discard(sock)

    # -- what tests look at

    def count(self) -> Counter[str]:
        with self.changed:
            return Counter(type(request).__name__ for request in self.seen)

    def wait_for(self, kind: type[M], number: int = 1) -> list[M]:
        """The requests of a kind, once so many came."""
        with self.changed:
            assert self.changed.wait_for(lambda: sum(type(r) is kind for r in self.seen) >= number, 5), (
                self.seen
            )
            return [request for request in self.seen if isinstance(request, kind)]

    def store(self, key: str, value: bytes, checksum: bytes | None = None, size: int | None = None) -> None:
        handle, name = tempfile.mkstemp(dir=self.directory)
        os.write(handle, value)
        os.close(handle)
        self.files[key] = Path(name), size or len(value), checksum or xxh3_128_digest(value)

    def value(self, key: str) -> bytes:
        path, size, checksum = self.files[key]
        value = path.read_bytes()[:size]
        assert xxh3_128_digest(value) == checksum
        return value

    # -- answers

    def _answer(self, sock: socket.socket, request: wire.Request) -> None:
        kind = type(request)
        if kind in self.garbage_on:
            sock.sendall(b"\x05\0\0\0hello")
        elif kind in self.fails:
            self._send(sock, wire.Failure(request.id, self.fails[kind], "as the test says"))
        else:
            getattr(self, f"_{kind.__name__.lower()}")(sock, request)

    def _send(self, sock: socket.socket, message: wire.Message, fds: list[int] | None = None) -> None:
        frame = wire.encode(message)
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = sock.sendmsg([frame], control)
        sock.sendall(frame[sent:])
        for fd in fds or ():
            os.close(fd)

    def _hello(self, sock: socket.socket, request: wire.Hello) -> None:
        self._send(
            sock,
            wire.HelloReply(
                request.id,
                self.version,
                "fake",
                self.backend,
                wire.MAX_FRAME_BYTES,
                self.max_keys,
                self.points,
            ),
        )

    def _unknown(
        self, sock: socket.socket, request: wire.Query | wire.Open | wire.Reserve | wire.Delete
    ) -> bool:
        if self.backend == "direct" or request.mountpoint in {point.index for point in self.points}:
            return False
        self._send(sock, wire.Failure(request.id, errno.ENODEV, f"no mountpoint {request.mountpoint}"))
        return True

    def _size(self, key: str) -> int:
        return self.statuses.get(key, self.files[key][1] if key in self.files else 0)

    def _query(self, sock: socket.socket, request: wire.Query) -> None:
        if not self._unknown(sock, request):
            self._send(sock, wire.QueryReply(request.id, [self._size(key) for key in request.keys]))

    def _open(self, sock: socket.socket, request: wire.Open) -> None:
        if self._unknown(sock, request):
            return
        sizes = [self._size(key) for key in request.keys]
        runs = list(wire.fd_slices([size > 0 for size in sizes], self.per_frame))
        for first, end in runs:
            hits = [
                key for key, size in zip(request.keys[first:end], sizes[first:end], strict=True) if size > 0
            ]
            fds = [os.open(self.files[key][0], os.O_RDONLY | self.open_flags) for key in hits]
            checksums = b"".join(self.files[key][2] for key in hits)
            flags = bytes([self.flags]) * len(hits)
            more = (first, end) != runs[-1]
            self._send(
                sock, wire.OpenReply(request.id, 77, first, sizes[first:end], checksums, flags, more), fds
            )

    def _release(self, sock: socket.socket, request: wire.Release) -> None:
        pass

    def _reserve(self, sock: socket.socket, request: wire.Reserve) -> None:
        if self._unknown(sock, request):
            return
        tokens = []
        for key, size in zip(request.keys, request.sizes, strict=True):
            if key in self.statuses or (request.if_exists != "overwrite" and key in self.files):
                tokens.append(self.statuses.get(key, -errno.EEXIST))
                continue
            handle, name = tempfile.mkstemp(dir=self.directory)
            os.close(handle)
            tokens.append(next(self._tokens))
            self.reserved[tokens[-1]] = key, Path(name), size
        runs = list(wire.fd_slices([token > 0 for token in tokens], self.per_frame))
        for first, end in runs:
            fds = [
                os.open(self.reserved[token][1], os.O_WRONLY | self.open_flags)
                for token in tokens[first:end]
                if token > 0
            ]
            self._send(
                sock, wire.ReserveReply(request.id, first, tokens[first:end], (first, end) != runs[-1]), fds
            )

    def _commit(self, sock: socket.socket, request: wire.Commit) -> None:
        for i, token in enumerate(request.tokens):
            key, path, size = self.reserved.pop(token)
            self.files[key] = path, size, request.checksums[16 * i : 16 * i + 16]
        self._send(sock, wire.CommitReply(request.id, [0] * len(request.tokens)))

    def _abort(self, sock: socket.socket, request: wire.Abort) -> None:
        for token in request.tokens:
            self.reserved.pop(token)

    def _delete(self, sock: socket.socket, request: wire.Delete) -> None:
        if not self._unknown(sock, request):
            statuses = [0 if self.files.pop(key, None) else -errno.ENOENT for key in request.keys]
            self._send(sock, wire.DeleteReply(request.id, statuses))

    def _check(self, sock: socket.socket, request: wire.Check) -> None:
        for key in request.keys:
            self.files.pop(key, None)
        self._send(sock, wire.CheckReply(request.id, [0] * len(request.keys)))
