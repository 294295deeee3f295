"""Connection: one client of the batch face, from its hello to its end.

One task reads and answers at once what needs no disk; other requests get a task each, so that they don't wait for each
other. Value bytes never come here: descriptors go out, the client moves the bytes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from collections.abc import Sequence
from functools import partial

import trio

from kvcsfs import __version__, wire
from kvcsfs.batch.requests import HANDLERS, Handler, Requests
from kvcsfs.batch.sender import Sender
from kvcsfs.engine.access import Rights
from kvcsfs.engine.engine import Engine
from kvcsfs.errors import InvalidValueError, KvcsError, ProtocolError
from kvcsfs.locks import acquire

log = logging.getLogger(__name__)

HELLO_SECONDS = 10.0  # to say it in
HELLO_BYTES = 4096
FRAME_SECONDS = 30.0  # for the rest of a frame to come: what came is held meanwhile
MAX_REQUESTS = 64  # of one connection at once; then it is not read further
RECEIVE_BYTES = 64 << 10  # below malloc's mmap threshold: fresh pages for each request took 13 µs (measured)


class Connection:
    """One client. What it holds ends with it."""

    def __init__(self, engine: Engine, client: socket.socket, uid: int, gids: Sequence[int]) -> None:
        self._engine = engine
        self._socket = client
        self._session = engine.session(uid)
        self._sender = Sender(client)
        self._requests = Requests(engine, self._session, Rights(engine.access, uid, gids), self._sender)
        self._free_places = trio.Semaphore(MAX_REQUESTS, max_value=MAX_REQUESTS)
        self._scope = trio.CancelScope()
        self._answering = self._draining = False

    # -- life

    async def serve(self) -> None:
        """Answer until the client goes or breaks the protocol."""
        try:
            async with trio.open_nursery() as nursery:
                with self._scope:
                    await self._read(nursery)
                if not self._draining:  # the client is gone: nobody waits for the answers
                    nursery.cancel_scope.cancel()
        except* (ConnectionError, BrokenPipeError):
            pass
        finally:
            self._socket.close()
            await self._engine.close_session(self._session)

    async def drain(self) -> None:
        """Read no more; return when what was read is answered."""
        self._draining = True
        while self._answering:  # to be cancelled then would tear its frame
            await trio.sleep(0.005)
        self._scope.cancel()
        while self._free_places.value < MAX_REQUESTS:
            await trio.sleep(0.005)

    async def _read(self, nursery: trio.Nursery) -> None:
        frames = wire.FrameBuffer(HELLO_BYTES)
        greeted = False
        try:
            while (data := await self._receive(greeted, frames.is_partial)) and not self._draining:
                self._answering = True
                for i, payload in enumerate(frames.feed(data)):
                    if i:  # others have their turn, and requests begin in the order in which they came
                        await trio.lowlevel.checkpoint()
                    try:
                        request = wire.decode_request(payload)
                    except wire.UnknownRequest as exc:
                        await self._sender.send(wire.Failure(exc.request_id, errno.EOPNOTSUPP, str(exc)))
                        continue
                    if not greeted:
                        await self._greet(request)
                        greeted = True
                        frames.limit = wire.MAX_FRAME_BYTES
                        continue
                    await self._dispatch(request, nursery)
                self._answering = False
        except ProtocolError as exc:
            with contextlib.suppress(OSError), trio.move_on_after(1):
                await self._sender.send(wire.Failure(0, exc.errno, str(exc)))
        finally:
            self._answering = False

    async def _receive(self, greeted: bool, partial: bool) -> bytes:
        """What has come, at least one byte; empty when the client is gone.

        Raises ProtocolError when a frame that is due doesn't come.
        """
        patience = FRAME_SECONDS if greeted else HELLO_SECONDS
        while True:
            if greeted and not partial:
                await trio.lowlevel.wait_readable(self._socket)
            else:
                with trio.move_on_after(patience) as waiting:
                    await trio.lowlevel.wait_readable(self._socket)
                if waiting.cancelled_caught:
                    raise ProtocolError(f"no whole frame in {patience:.0f} s")
            with contextlib.suppress(BlockingIOError):  # as the kernel may have been wrong
                return self._socket.recv(RECEIVE_BYTES)

    async def _greet(self, request: wire.Request) -> None:
        if not isinstance(request, wire.Hello):
            raise ProtocolError("the first request must be hello")
        if request.version != wire.PROTOCOL_VERSION:
            raise ProtocolError(f"protocol version {request.version}, expected {wire.PROTOCOL_VERSION}")
        mountpoints = [
            wire.MountpointInfo(v.index, v.config.capacity, v.store.in_memory, v.store.align)
            for v in self._engine.volumes
        ]
        await self._sender.send(
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
            case wire.Query() if self._engine.is_calm(request.mountpoint):
                await self._answer(Requests.query, request)
            case wire.Open() if opened := self._requests.open_ready(request):
                await self._answer(partial(Requests.send_opened, opened=opened), request)
            case _:
                handler = HANDLERS.get(type(request))
                if handler is None:
                    raise ProtocolError("hello was said already")
                await acquire(self._free_places)
                nursery.start_soon(self._run, handler, request)

    async def _run(self, handler: Handler, request: wire.Request) -> None:
        try:
            await self._answer(handler, request)
        finally:
            self._free_places.release()

    async def _answer(self, handler: Handler, request: wire.Request) -> None:
        """Run a handler; what it raises becomes a failure reply, so that no request ends the daemon."""
        try:
            names = getattr(request, "keys", ())
            if len(names) > wire.MAX_KEYS:
                raise InvalidValueError(f"{len(names)} keys in one request, expected at most {wire.MAX_KEYS}")
            await handler(self._requests, request)
        except KvcsError as exc:
            await self._sender.send(wire.Failure(request.id, exc.errno, str(exc)))
        except (ConnectionError, BrokenPipeError):
            raise
        except Exception:
            log.exception("%s failed", type(request).__name__)
            await self._sender.send(
                wire.Failure(request.id, errno.EIO, "internal error, see the daemon's log")
            )
