"""Batch face: the Unix socket. It translates frames to calls of the engine; it decides nothing.

One task a connection reads and answers at once what needs no disk; other requests get a task each, so that they don't
wait for each other. Value bytes never come here: descriptors go out, the client moves the bytes.
"""

from __future__ import annotations

import array
import collections
import contextlib
import ctypes
import errno
import fcntl
import grp
import itertools
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import trio

from kvcsfs import __version__, wire
from kvcsfs.engine.access import Rights
from kvcsfs.engine.engine import Engine, Opened
from kvcsfs.engine.entry import Entry
from kvcsfs.engine.session import Session, Staged
from kvcsfs.errors import AccessError, ConfigError, InvalidValueError, KvcsError, ProtocolError

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
MAX_USER_CONNECTIONS = 1024  # so that one user's processes don't keep the others out
ACCEPT_AT_ONCE = 16
HELLO_SECONDS = 10.0  # to say it in
HELLO_BYTES = 4096
FRAME_SECONDS = 30.0  # for the rest of a frame to come: what came is held meanwhile
MAX_REQUESTS = 64  # of one connection at once; then it is not read further
RECEIVE_BYTES = 1 << 18
VERIFY_BYTES = 64 << 20  # of one verify request, so that its reply comes soon
TTL_GRACE_SECONDS = 30.0  # a reservation outlives its client's deadline by this
STOP_SECONDS = 5.0
MAX_GROUPS = 65536  # NGROUPS_MAX, credentials(7)
_SO_PEERGROUPS = 59
_SIOCOUTQ = 0x5411  # bytes the peer hasn't read, unix(7)


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
                for connection in list(self._connections):
                    await connection.drain()
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
        for count in itertools.count():
            if (
                count % ACCEPT_AT_ONCE == 0
            ):  # a flood of connections must not keep the others' requests waiting
                await trio.lowlevel.checkpoint()
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
            await (
                trio.lowlevel.checkpoint()
            )  # a flood of connections must not keep the others' requests waiting

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


class Connection:
    """One client. What it holds ends with it."""

    def __init__(self, engine: Engine, client: socket.socket, uid: int, gids: Sequence[int]) -> None:
        self._engine = engine
        self._socket = client
        self._rights = Rights(engine.access, uid, gids)
        self._session = engine.session(uid)
        self._sending = trio.Lock()
        self._closing: set[trio.Event] = set()
        self._free_places = trio.Semaphore(MAX_REQUESTS, max_value=MAX_REQUESTS)
        self._descriptors_sent = False
        self._scope = trio.CancelScope()

    # -- life

    async def serve(self) -> None:
        """Answer until the client goes or breaks the protocol."""
        try:
            async with trio.open_nursery() as nursery:
                with self._scope:
                    await self._read(nursery)
                if not self._scope.cancelled_caught:  # the client is gone: nobody waits for the answers
                    nursery.cancel_scope.cancel()
        except* (ConnectionError, BrokenPipeError):
            pass
        finally:
            self._socket.close()
            await self._engine.close_session(self._session)

    async def drain(self) -> None:
        """Read no more; return when what was read is answered."""
        self._scope.cancel()
        while self._free_places.value < MAX_REQUESTS:
            await trio.sleep(0.005)

    async def _read(self, nursery: trio.Nursery) -> None:
        frames = wire.FrameBuffer(HELLO_BYTES)
        greeted = False
        try:
            while data := await self._receive(greeted, frames.is_partial):
                for payload in frames.feed(data):
                    try:
                        request = wire.decode_request(payload)
                    except wire.UnknownRequest as exc:
                        await self._send(wire.Failure(exc.request_id, errno.EOPNOTSUPP, str(exc)))
                        continue
                    if not greeted:
                        await self._greet(request)
                        greeted = True
                        frames.limit = wire.MAX_FRAME_BYTES
                        continue
                    await self._dispatch(request, nursery)
        except ProtocolError as exc:
            with contextlib.suppress(OSError), trio.move_on_after(1):
                await self._send(wire.Failure(0, exc.errno, str(exc)))

    async def _receive(self, greeted: bool, partial: bool) -> bytes:
        """What has come, at least one byte; empty when the client is gone.

        Raises ProtocolError when a frame that is due doesn't come.
        """
        while True:
            try:
                return self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                patience = (FRAME_SECONDS if partial else float("inf")) if greeted else HELLO_SECONDS
                with trio.move_on_after(patience) as waiting:
                    await trio.lowlevel.wait_readable(self._socket)
                if waiting.cancelled_caught:
                    raise ProtocolError(f"no whole frame in {patience:.0f} s") from None

    async def _greet(self, request: wire.Request) -> None:
        if not isinstance(request, wire.Hello):
            raise ProtocolError("the first request must be hello")
        if request.version != wire.PROTOCOL_VERSION:
            raise ProtocolError(f"protocol version {request.version}, expected {wire.PROTOCOL_VERSION}")
        mountpoints = [
            wire.MountpointInfo(v.index, v.config.capacity, v.store.in_memory, v.store.align)
            for v in self._engine.volumes
        ]
        await self._send(
            wire.HelloReply(
                request.id,
                wire.PROTOCOL_VERSION,
                f"kvcsfs {__version__}",
                self._engine.config.backend,
                wire.MAX_FRAME_BYTES,
                wire.MAX_KEYS,
                mountpoints,
            )
        )

    # -- requests

    async def _dispatch(self, request: wire.Request, nursery: trio.Nursery) -> None:
        session = self._session
        match request:
            case wire.Release():
                self._engine.release(session, request.lease)
            case wire.Query():
                await self._answer(self._query, request)
            case wire.Open() if self._engine.is_ready(session, request.mountpoint, request.keys):
                await self._answer(self._open, request)
            case _:
                handler = _HANDLERS.get(type(request))
                if handler is None:
                    raise ProtocolError("hello was said already")
                await self._free_places.acquire()
                nursery.start_soon(self._run, handler, request)

    async def _run(self, handler: Handler, request: wire.Request) -> None:
        try:
            await self._answer(handler.__get__(self), request)
        finally:
            self._free_places.release()

    async def _answer(
        self, handler: Callable[[Any], Coroutine[Any, Any, None]], request: wire.Request
    ) -> None:
        """Run a handler; what it raises becomes a failure reply, so that no request ends the daemon."""
        try:
            names = getattr(request, "keys", ())
            if len(names) > wire.MAX_KEYS:
                raise InvalidValueError(f"{len(names)} keys in one request, expected at most {wire.MAX_KEYS}")
            await handler(request)
        except KvcsError as exc:
            await self._send(wire.Failure(request.id, exc.errno, str(exc)))
        except (ConnectionError, BrokenPipeError):
            raise
        except Exception:
            log.exception("%s failed", type(request).__name__)
            await self._send(wire.Failure(request.id, errno.EIO, "internal error, see the daemon's log"))

    async def _query(self, request: wire.Query) -> None:
        async def query(names: Sequence[str]) -> list[int]:
            found = await self._engine.query_many(request.mountpoint, names, request.renew)
            return [0 if e is None else e.size for e in found]

        await self._send(wire.QueryReply(request.id, await self._permitted(request, False, query)))

    async def _open(self, request: wire.Open) -> None:
        session = self._session
        opened = await self._open_permitted(request, session)
        try:
            await self._send_opened(request.id, opened, session)
        except BaseException:
            self._engine.release(session, opened.lease)
            raise

    async def _open_permitted(self, request: wire.Open, session: Session) -> Opened:
        names = request.keys
        if not self._rights.restricted:
            return await self._engine.open_many(session, request.mountpoint, names, request.renew)
        opened = Opened(0, [], {}, [])

        async def act(granted: list[int]) -> list[Entry | None]:
            nonlocal opened
            wanted = [names[i] for i in granted]
            opened = await self._engine.open_many(session, request.mountpoint, wanted, request.renew)
            opened.errors = {granted[i]: error for i, error in opened.errors.items()}
            return opened.entries

        results = await self._rights.filtered(request.mountpoint, names, False, act)
        refused = {i: r for i, r in enumerate(results) if isinstance(r, AccessError)}
        entries = [None if isinstance(r, AccessError) else r for r in results]
        return Opened(opened.lease, entries, opened.errors | refused, opened.fds)

    async def _permitted(
        self,
        request: wire.Query | wire.Delete | wire.Check,
        write: bool,
        act: Callable[[Sequence[str]], Awaitable[list[int]]],
    ) -> list[int]:
        """Statuses of a request's keys: `act` gives those of the keys that this peer may touch."""
        if not self._rights.restricted:
            return await act(request.keys)

        async def some(granted: list[int]) -> list[int]:
            return await act([request.keys[i] for i in granted])

        results = await self._rights.filtered(request.mountpoint, request.keys, write, some)
        return [wire.errno_of(r) if isinstance(r, AccessError) else r for r in results]

    async def _send_opened(self, request_id: int, opened: Opened, session: Session) -> None:
        fds = iter(opened.fds)
        entries = opened.entries
        hits = [e is not None for e in entries]
        for first, end in wire.fd_slices(hits):
            part = entries[first:end]
            sizes = [0 if e is None else e.size for e in part]
            for i, error in opened.errors.items():
                if first <= i < end:
                    sizes[i - first] = wire.errno_of(error)
            found = [e for e in part if e is not None]
            reply = wire.OpenReply(
                request_id,
                opened.lease,
                first,
                sizes,
                b"".join([e.checksum for e in found]),
                bytes([e.flags & wire.UNPROVEN for e in found]),
                end < len(entries),
            )
            carried = list(itertools.islice(fds, len(found)))
            await self._send(reply, carried, lambda: not opened.lease or opened.lease in session.leases)

    async def _reserve(self, request: wire.Reserve) -> None:
        session = self._session
        if len(request.sizes) != len(request.keys) or request.if_exists not in IF_EXISTS:
            raise InvalidValueError("reserve: expected as many sizes as keys, and if_exists as documented")
        ttl = request.ttl_seconds + TTL_GRACE_SECONDS if request.ttl_seconds > 0 else 0.0

        async def reserve(granted: Sequence[int]) -> list[Staged | KvcsError]:
            names, sizes = [request.keys[i] for i in granted], [request.sizes[i] for i in granted]
            return await self._engine.reserve_many(
                session, request.mountpoint, names, sizes, request.if_exists, ttl
            )

        results: Sequence[Staged | KvcsError]
        if self._rights.restricted:
            results = await self._rights.filtered(request.mountpoint, request.keys, True, reserve)
        else:
            results = await self._engine.reserve_many(
                session, request.mountpoint, request.keys, request.sizes, request.if_exists, ttl
            )
        fds = [r.fd for r in results if isinstance(r, Staged)]
        try:
            await self._send_reserved(request.id, results, fds)
        finally:
            closed = trio.Event()
            self._closing.add(closed)
            await self._engine.close_fds(request.mountpoint, fds)
            self._closing.remove(closed)
            closed.set()

    async def _send_reserved(
        self, request_id: int, results: Sequence[Staged | KvcsError], fds: Sequence[int]
    ) -> None:
        sent = 0
        for first, end in wire.fd_slices([isinstance(r, Staged) for r in results]):
            tokens = [r.token if isinstance(r, Staged) else wire.errno_of(r) for r in results[first:end]]
            count = sum(t > 0 for t in tokens)
            reply = wire.ReserveReply(request_id, first, tokens, end < len(results))
            await self._send(reply, fds[sent : sent + count])
            sent += count

    async def _commit(self, request: wire.Commit) -> None:
        sums = request.checksums
        size = wire.CHECKSUM_BYTES
        if len(sums) != size * len(request.tokens) or request.if_exists not in IF_EXISTS:
            raise InvalidValueError(
                "commit: expected 16 bytes of checksum a token, and if_exists as documented"
            )
        session = self._session
        checksums = [sums[i : i + size] for i in range(0, len(sums), size)]
        for closed in list(self._closing):  # our own copies of the descriptors must be closed first
            await closed.wait()
        if self._rights.restricted:
            await self._revoke(session, request.tokens)
        results = await self._engine.commit_many(session, request.tokens, checksums, request.if_exists)
        await self._send(wire.CommitReply(request.id, _statuses(results)))

    async def _revoke(self, session: Session, tokens: Sequence[int]) -> None:
        """Give up reservations that new access rules don't permit any more; their commit finds none."""
        staged = [s for token in tokens if (s := session.staged.get(token))]
        late = [s.token for s in staged if not self._rights.may(s.volume.index, s.entry.key, True)]
        await self._engine.abort_many(session, late)

    async def _abort(self, request: wire.Abort) -> None:
        await self._engine.abort_many(self._session, request.tokens)

    async def _delete(self, request: wire.Delete) -> None:
        async def delete(names: Sequence[str]) -> list[int]:
            return _statuses(await self._engine.delete_many(request.mountpoint, names))

        await self._send(wire.DeleteReply(request.id, await self._permitted(request, True, delete)))

    async def _check(self, request: wire.Check) -> None:
        async def check(names: Sequence[str]) -> list[int]:
            return await self._engine.verify_many(request.mountpoint, names)

        await self._send(wire.CheckReply(request.id, await self._permitted(request, False, check)))

    async def _usage(self, request: wire.Usage) -> None:
        self._rights.need_below(request.mountpoint, request.prefix, write=False)
        usage = await self._engine.usage(request.mountpoint, request.prefix)
        await self._send(wire.UsageReply(request.id, *usage))

    async def _list(self, request: wire.List) -> None:
        self._rights.need_below(request.mountpoint, request.prefix, write=False)
        limit = max(1, min(request.limit, wire.MAX_KEYS))
        page = await self._engine.page(request.mountpoint, request.prefix, request.after, limit + 1)
        listed = [wire.ListedEntry(e.key, e.size, e.created, e.checksum) for e in page[:limit]]
        await self._send(wire.ListReply(request.id, listed, len(page) > limit))

    async def _evict(self, request: wire.Evict) -> None:
        self._rights.need_below(request.mountpoint, request.prefix, write=True)
        result = await self._engine.evict(request.mountpoint, request.prefix, request.target_bytes)
        await self._send(wire.EvictReply(request.id, *result))

    async def _remove(self, request: wire.Remove) -> None:
        self._rights.need_below(request.mountpoint, request.prefix, write=True)
        result = await self._engine.remove_prefix(request.mountpoint, request.prefix)
        await self._send(wire.EvictReply(request.id, *result))

    async def _verify(self, request: wire.Verify) -> None:
        self._rights.need_below(request.mountpoint, "", write=True)
        limit = max(1, min(request.limit_bytes, VERIFY_BYTES))
        done = await self._engine.verify_after(request.mountpoint, request.after, limit)
        reply = wire.VerifyReply(
            request.id, done.entries, done.size_bytes, done.dropped, done.last, done.more
        )
        await self._send(reply)

    async def _status(self, request: wire.Status) -> None:
        await self._send(wire.StatusReply(request.id, self._engine.status()))

    # -- sending

    async def _send(
        self, reply: wire.Message, fds: Sequence[int] = (), still_valid: Callable[[], bool] = lambda: True
    ) -> None:
        """Send one frame whole, its descriptors on its first byte."""
        frame = wire.encode(reply)
        async with self._sending:
            if fds:
                await self._descriptors_taken()
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
                    await trio.sleep(
                        0.01
                    )  # descriptors in flight count against the user: others must take theirs
                    continue
                view = view[sent:]
                control = []
            self._descriptors_sent = bool(fds) or self._descriptors_sent

    async def _descriptors_taken(self) -> None:
        """Wait until the client has read the last frame with descriptors: one may be in flight."""
        while self._descriptors_sent:
            unread = fcntl.ioctl(self._socket, _SIOCOUTQ, b"\0\0\0\0")
            if unread == b"\0\0\0\0":
                self._descriptors_sent = False
                return
            await trio.sleep(0.0005)


IF_EXISTS = ("overwrite", "keep", "error")
Handler = Callable[[Connection, Any], Coroutine[Any, Any, None]]
_HANDLERS: dict[type, Handler] = {
    wire.Open: Connection._open,
    wire.Reserve: Connection._reserve,
    wire.Commit: Connection._commit,
    wire.Abort: Connection._abort,
    wire.Delete: Connection._delete,
    wire.Check: Connection._check,
    wire.Usage: Connection._usage,
    wire.List: Connection._list,
    wire.Evict: Connection._evict,
    wire.Remove: Connection._remove,
    wire.Verify: Connection._verify,
    wire.Status: Connection._status,
}


def _statuses(results: Sequence[KvcsError | None]) -> list[int]:
    return [0 if r is None else wire.errno_of(r) for r in results]
