"""The face itself: the listening socket, who connects to it, and how many may."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import grp
import logging
import os
import socket
import struct
from pathlib import Path

import trio

from kvcsfs import wire
from kvcsfs.batch.connection import Connection
from kvcsfs.engine.engine import Engine
from kvcsfs.errors import ConfigError

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
MAX_USER_CONNECTIONS = 1024  # so that one user's processes don't keep the others out
STOP_SECONDS = 5.0
MAX_GROUPS = 65536  # NGROUPS_MAX, credentials(7)
_SO_PEERGROUPS = 59


class BatchFace:
    """Listens at a socket path and serves its clients.

    Raises ConfigError: the path is taken by a live daemon, or can't be used.
    """

    def __init__(self, engine: Engine, path: Path, group: str = "") -> None:
        self._engine = engine
        self._path = path
        self._listener = listen(path, group)
        self._inode = os.stat(path).st_ino
        self._stopping = trio.Event()
        self._connections: set[Connection] = set()
        self._by_user: collections.Counter[int] = collections.Counter()

    async def serve(self) -> None:
        """Accept until `stop`; ends when every request under way is answered, or after `STOP_SECONDS`."""
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as accepting:
                accepting.start_soon(self._accept, connections)
                await self._stopping.wait()
                accepting.cancel_scope.cancel()
            self._close_listener()
            with trio.move_on_after(STOP_SECONDS):
                async with trio.open_nursery() as draining:  # who reads no answers must not delay the others
                    for connection in self._connections:
                        draining.start_soon(connection.drain)
            connections.cancel_scope.cancel()

    def stop(self) -> None:
        """Take no more requests."""
        self._stopping.set()

    def _close_listener(self) -> None:
        self._listener.close()
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)

    async def _accept(self, nursery: trio.Nursery) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._listener)
                continue
            except OSError as exc:  # no descriptor left, or the client went: the others go on
                log.warning("a connection could not be accepted: %s", exc.strerror)
                await trio.sleep(0.1)
                continue
            nursery.start_soon(self._serve_one, client)
            # A flood of connections must not keep the others' requests waiting.
            await trio.lowlevel.checkpoint()

    async def _serve_one(self, client: socket.socket) -> None:
        client.setblocking(False)
        try:
            uid, gids = peer_of(client)
        except OSError as exc:
            client.close()
            log.warning("a connection's user isn't known: %s", exc.strerror)
            return
        if len(self._connections) >= MAX_CONNECTIONS or self._by_user[uid] >= MAX_USER_CONNECTIONS:
            failure = wire.Failure(0, errno.EMFILE, f"user {uid} has too many connections, close some")
            with client, contextlib.suppress(OSError):
                client.send(wire.encode(failure))
            return
        connection = Connection(self._engine, client, uid, gids)
        self._connections.add(connection)
        self._by_user[uid] += 1
        try:
            await connection.serve()
        except Exception:
            log.exception("a connection failed")
        finally:
            self._connections.discard(connection)
            self._by_user[uid] -= 1


def listen(path: Path, group: str) -> socket.socket:
    """Bind the socket, mode 0660; its directory is made, the socket of a dead daemon replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        gid = grp.getgrnam(group).gr_gid if group else None
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear_stale(path)
        mask = os.umask(0o117)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        if gid is not None:
            os.chown(path, -1, gid)
        listener.listen(1024)
        listener.setblocking(False)
    except KeyError:
        listener.close()
        raise ConfigError(f"socket_group: there is no group {group!r}, expected an existing one") from None
    except OSError as exc:
        listener.close()
        raise ConfigError(f"socket {path}: {exc.strerror}") from exc
    except ConfigError:
        listener.close()
        raise
    return listener


def _clear_stale(path: Path) -> None:
    if not os.path.lexists(path):
        return
    if not path.is_socket():
        raise ConfigError(f"socket {path}: something else is there, expected a path that is free")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:  # its backlog is full
            pass
        except FileNotFoundError:
            return
    raise ConfigError(f"socket {path}: a daemon answers there already; stop it or give another --socket")


def peer_of(client: socket.socket) -> tuple[int, list[int]]:
    """The uid of a connected peer, and its gids, as they were when it connected. Source: unix(7), socket(7)."""
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, uid, gid = struct.unpack("3I", credentials)
    groups = (ctypes.c_uint32 * MAX_GROUPS)()
    size = ctypes.c_uint32(ctypes.sizeof(groups))
    libc = ctypes.CDLL(None, use_errno=True)  # Python's getsockopt gives 1,024 bytes at most
    if libc.getsockopt(client.fileno(), socket.SOL_SOCKET, _SO_PEERGROUPS, groups, ctypes.byref(size)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return uid, [gid, *groups[: size.value // 4]]
