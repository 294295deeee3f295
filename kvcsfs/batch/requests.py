"""Requests: what each request of a client asks of the engine, and how its answer reads."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import trio

from kvcsfs import wire
from kvcsfs.batch.sender import Sender
from kvcsfs.engine.access import Rights
from kvcsfs.engine.engine import Engine, Opened
from kvcsfs.engine.entry import Entry
from kvcsfs.engine.session import Session, Staged
from kvcsfs.errors import AccessError, InvalidValueError, KvcsError

VERIFY_BYTES = 64 << 20  # of one verify request, so that its reply comes soon
OPEN_SLICE = 64  # descriptors of a frame: the client reads these values while the next frame is made
TTL_GRACE_SECONDS = 30.0  # a reservation outlives its client's deadline by this
IF_EXISTS = ("overwrite", "keep", "error")


class Requests:
    """The requests of one client: a method each, which sends the reply. What it raises is the request's failure."""

    def __init__(self, engine: Engine, session: Session, rights: Rights, sender: Sender) -> None:
        self._engine = engine
        self._session = session
        self._rights = rights
        self._sender = sender
        self._unclosed: dict[int, trio.Event] = {}  # tokens whose descriptors we have open, too

    # -- gets

    async def query(self, request: wire.Query) -> None:
        async def query(names: Sequence[str]) -> list[int]:
            found = await self._engine.query_many(request.mountpoint, names, request.renew)
            return [0 if e is None else e.size for e in found]

        await self._sender.send(wire.QueryReply(request.id, await self._permitted(request, False, query)))

    def open_ready(self, request: wire.Open) -> Opened | None:
        """What needs no disk, at once; None if it is for `open`."""
        if self._rights.restricted or len(request.keys) > wire.MAX_KEYS:
            return None
        return self._engine.open_ready(self._session, request.mountpoint, request.keys, request.renew)

    async def open(self, request: wire.Open) -> None:
        await self.send_opened(request, await self._open_permitted(request))

    async def send_opened(self, request: wire.Open, opened: Opened) -> None:
        """Send what was opened; if that fails it is given back."""
        try:
            await self._send_opened(request.id, opened)
        except BaseException:
            self._engine.release(self._session, opened.lease)
            raise

    async def _open_permitted(self, request: wire.Open) -> Opened:
        session, names = self._session, request.keys
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

    async def _send_opened(self, request_id: int, opened: Opened) -> None:
        leases = self._session.leases
        fds = iter(opened.fds)
        entries = opened.entries
        hits = [e is not None for e in entries]
        for first, end in wire.fd_slices(hits, OPEN_SLICE):
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
            await self._sender.send(reply, carried, lambda: not opened.lease or opened.lease in leases)

    # -- puts

    async def reserve(self, request: wire.Reserve) -> None:
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
        staged = [r for r in results if isinstance(r, Staged)]
        fds, closed = [s.fd for s in staged], trio.Event()
        self._unclosed.update((s.token, closed) for s in staged)
        try:
            await self._send_reserved(request.id, results, fds)
        finally:
            await self._engine.close_fds(request.mountpoint, fds)
            for s in staged:
                del self._unclosed[s.token]
            closed.set()

    async def _send_reserved(
        self, request_id: int, results: Sequence[Staged | KvcsError], fds: Sequence[int]
    ) -> None:
        sent = 0
        for first, end in wire.fd_slices([isinstance(r, Staged) for r in results]):
            tokens = [r.token if isinstance(r, Staged) else wire.errno_of(r) for r in results[first:end]]
            count = sum(t > 0 for t in tokens)
            reply = wire.ReserveReply(request_id, first, tokens, end < len(results))
            await self._sender.send(reply, fds[sent : sent + count])
            sent += count

    async def commit(self, request: wire.Commit) -> None:
        sums = request.checksums
        size = wire.CHECKSUM_BYTES
        if len(sums) != size * len(request.tokens) or request.if_exists not in IF_EXISTS:
            raise InvalidValueError(
                "commit: expected 16 bytes of checksum a token, and if_exists as documented"
            )
        checksums = [sums[i : i + size] for i in range(0, len(sums), size)]
        for token in request.tokens:  # our own copies of the descriptors must be closed first
            if (closed := self._unclosed.get(token)) is not None:
                await closed.wait()
        if self._rights.restricted:
            await self._revoke(request.tokens)
        results = await self._engine.commit_many(self._session, request.tokens, checksums, request.if_exists)
        await self._sender.send(wire.CommitReply(request.id, _statuses(results)))

    async def _revoke(self, tokens: Sequence[int]) -> None:
        """Give up reservations that new access rules don't permit any more; their commit finds none."""
        staged = [s for token in tokens if (s := self._session.staged.get(token))]
        late = [s.token for s in staged if not self._rights.may(s.volume.index, s.entry.key, True)]
        await self._engine.abort_many(self._session, late)

    async def abort(self, request: wire.Abort) -> None:
        await self._engine.abort_many(self._session, request.tokens)

    # -- keys and prefixes

    async def delete(self, request: wire.Delete) -> None:
        async def delete(names: Sequence[str]) -> list[int]:
            return _statuses(await self._engine.delete_many(request.mountpoint, names))

        await self._sender.send(wire.DeleteReply(request.id, await self._permitted(request, True, delete)))

    async def check(self, request: wire.Check) -> None:
        async def check(names: Sequence[str]) -> list[int]:
            return await self._engine.verify_many(request.mountpoint, names)

        await self._sender.send(wire.CheckReply(request.id, await self._permitted(request, False, check)))

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

    async def usage(self, request: wire.Usage) -> None:
        self._rights.need_below(request.mountpoint, request.prefix, write=False)
        usage = await self._engine.usage(request.mountpoint, request.prefix)
        await self._sender.send(wire.UsageReply(request.id, *usage))

    async def page(self, request: wire.List) -> None:
        self._rights.need_below(request.mountpoint, request.prefix, write=False)
        limit = max(1, min(request.limit, wire.MAX_KEYS))
        page = await self._engine.page(request.mountpoint, request.prefix, request.after, limit + 1)
        listed = [wire.ListedEntry(e.key, e.size, e.created, e.checksum) for e in page[:limit]]
        await self._sender.send(wire.ListReply(request.id, listed, len(page) > limit))

    async def evict(self, request: wire.Evict) -> None:
        self._rights.need_below(request.mountpoint, request.prefix, write=True)
        result = await self._engine.evict(request.mountpoint, request.prefix, request.target_bytes)
        await self._sender.send(wire.EvictReply(request.id, *result))

    async def remove(self, request: wire.Remove) -> None:
        self._rights.need_below(request.mountpoint, request.prefix, write=True)
        result = await self._engine.remove_prefix(request.mountpoint, request.prefix)
        await self._sender.send(wire.EvictReply(request.id, *result))

    async def verify(self, request: wire.Verify) -> None:
        self._rights.need_below(request.mountpoint, "", write=True)
        limit = max(1, min(request.limit_bytes, VERIFY_BYTES))
        done = await self._engine.verify_after(request.mountpoint, request.after, limit)
        reply = wire.VerifyReply(
            request.id, done.entries, done.size_bytes, done.dropped, done.last, done.more
        )
        await self._sender.send(reply)

    async def status(self, request: wire.Status) -> None:
        await self._sender.send(wire.StatusReply(request.id, self._engine.status()))


Handler = Callable[[Requests, Any], Coroutine[Any, Any, None]]
HANDLERS: dict[type, Handler] = {
    wire.Query: Requests.query,
    wire.Open: Requests.open,
    wire.Reserve: Requests.reserve,
    wire.Commit: Requests.commit,
    wire.Abort: Requests.abort,
    wire.Delete: Requests.delete,
    wire.Check: Requests.check,
    wire.Usage: Requests.usage,
    wire.List: Requests.page,
    wire.Evict: Requests.evict,
    wire.Remove: Requests.remove,
    wire.Verify: Requests.verify,
    wire.Status: Requests.status,
}


def _statuses(results: Sequence[KvcsError | None]) -> list[int]:
    return [0 if r is None else wire.errno_of(r) for r in results]
