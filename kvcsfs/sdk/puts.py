"""A batch put: reserve, transfer, commit."""

from __future__ import annotations

import errno
import math
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

from kvcsfs import wire
from kvcsfs.errors import KvcsError, KvcsTimeoutError
from kvcsfs.sdk.buffers import Source, size_of
from kvcsfs.sdk.channel import Exchange, Link, charged_bytes
from kvcsfs.sdk.connection import Frame
from kvcsfs.sdk.core import Core, CutShortError, broken, give_up, key_limit, open_places, pick
from kvcsfs.sdk.deadline import Deadline
from kvcsfs.sdk.keys import check_keys
from kvcsfs.sdk.results import IfExists
from kvcsfs.sdk.transfer import PENDING
from kvcsfs.sdk.workers import Errand
from kvcsfs.sdk.writing import Slots, Writing

# Of one reserve: enough to carry its round trips, small enough that the lanes of a batch overlap. For 256 values of
# 64 KiB 128 was the best of 32, 64 and 128 (measured).
PART_KEYS = 128
ONE_PART_KEYS = 64  # so few, or fewer, are not worth a second lane
_NO_POINT = wire.MountpointInfo(0, 0)


class _Todo:
    """The places of a put that no lane has taken yet, and what made a lane fail."""

    def __init__(self, places: Sequence[int]) -> None:
        self._places = places
        self._lock = threading.Lock()
        self.failure: KvcsError | None = None

    def take(self, count: Callable[[Sequence[int]], int]) -> Sequence[int]:
        """The next places, as many as `count` says of all that are left; empty at the end."""
        with self._lock:
            at = count(self._places)
            part, self._places = self._places[:at], self._places[at:]
            return part

    def stop(self) -> None:
        with self._lock:
            self._places = ()

    def fail(self, failure: KvcsError) -> None:
        self.failure = self.failure or failure
        self.stop()


class Put:
    """One call; `statuses` is its result, by place in the batch. It raises nothing that the world does."""

    def __init__(
        self,
        core: Core,
        keys: list[str],
        sources: list[Source],
        deadline: Deadline,
        mountpoint: int,
        if_exists: IfExists,
    ) -> None:
        self._core, self._keys, self._sources = core, keys, sources
        self._deadline, self._mountpoint, self._if_exists = deadline, mountpoint, if_exists
        self._lanes, self._part_charge = 1, 0
        self.statuses = check_keys(keys, core.max_key_size)
        self.sizes = [size_of(source) for source in sources]
        if self.sizes and (min(self.sizes) <= 0 or max(self.sizes) > core.max_value_size):
            self._check_sizes()

    def _check_sizes(self) -> None:
        for i, size in enumerate(self.sizes):
            if self.statuses[i] == PENDING and not size:
                self.statuses[i] = -errno.EINVAL
            elif self.statuses[i] == PENDING and size > self._core.max_value_size:
                self.statuses[i] = -errno.E2BIG

    def run(self) -> None:
        places = open_places(self.statuses)
        last = {self._keys[place]: place for place in places}
        doubled = (
            [place for place in places if last[self._keys[place]] != place]
            if len(last) != len(places)
            else []
        )
        sent = [place for place in places if last[self._keys[place]] == place] if doubled else places
        try:
            self._run_parts(sent)
            rest = errno.EIO
        except KvcsError as exc:
            rest = exc.errno
        for place in doubled:  # the last of one key wins, and speaks for the others
            self.statuses[place] = self.statuses[last[self._keys[place]]]
        give_up(self.statuses, -rest)

    def _run_parts(self, places: Sequence[int]) -> None:
        """Run all parts in two lanes: while one moves bytes, the daemon reserves or commits for the other."""
        todo = _Todo(places)
        if len(places) > ONE_PART_KEYS:
            self._lanes = 2
        second = Errand(self._core.simple, partial(self._lane, todo)) if self._lanes > 1 else None
        try:
            self._lane(todo)
        finally:
            todo.stop()
            if second is not None:
                second.settle()
        if todo.failure is not None:
            raise todo.failure

    def _lane(self, todo: _Todo) -> None:
        """Take parts until none is left, or one of either lane failed as a whole."""
        try:
            while True:
                link = self._core.channel.link(self._deadline)
                part = todo.take(partial(self._cut, link=link))
                if not part:
                    return
                self._run_or_halve(part, link)
        except KvcsError as exc:
            todo.fail(exc)

    def _run_or_halve(self, part: Sequence[int], link: Link) -> None:
        try:
            self._run_part(part, sum(charged_bytes(self.sizes[place]) for place in part), link)
        except CutShortError:
            if len(part) == 1:
                self.statuses[part[0]] = -errno.EMFILE
                return
            for half in (part[: len(part) // 2], part[len(part) // 2 :]):
                self._run_or_halve(half, link)

    def _cut(self, places: Sequence[int], link: Link) -> int:
        """How many keys the next part has: all lanes must fit into what one connection may reserve; at least one."""
        count = min(PART_KEYS, self._core.channel.max_fds, key_limit(self._core, link))
        gate = link.gate(self._mountpoint)
        limit = max(1, gate.limit // self._lanes) if gate is not None else sys.maxsize
        if not self._part_charge:
            self._part_charge = self._equal(places, count, limit)
        charge = 0
        for i, place in enumerate(places[:count]):
            if charge >= self._part_charge:
                return i
            charge += charged_bytes(self.sizes[place])
            if charge > limit:
                return max(1, i)
        return count

    def _equal(self, places: Sequence[int], count: int, limit: int) -> int:
        """What a part is charged if all are equal, as many for each lane: else one lane moves the last part alone."""
        charge = sum(charged_bytes(self.sizes[place]) for place in places)
        rounds = max(-(-len(places) // (count * self._lanes)), -(-charge // (limit * self._lanes)))
        return -(-charge // (rounds * self._lanes))

    def _run_part(self, part: Sequence[int], charge: int, link: Link) -> None:
        """Take this part's share of what calls have in common, run it, and give the share back."""
        begin, fds, space = perf_counter(), self._core.channel.fds, link.gate(self._mountpoint)
        reserved = space.take(charge, self._deadline) if space is not None else charge
        taken = fds.take(len(part), self._deadline) if reserved else 0
        try:
            if not taken:
                raise KvcsTimeoutError(
                    "other calls of this client held the room for this one until the deadline"
                )
            self._reserve(part, partial(fds.give, taken), begin)
        finally:
            if space is not None and reserved:
                space.give(reserved)

    def _reserve(self, part: Sequence[int], fds_closed: partial[None], begin: float) -> None:
        core, deadline, asked = self._core, self._deadline, perf_counter()
        keys, sizes = pick(self._keys, part), [self.sizes[place] for place in part]
        left = deadline.remaining()
        ttl = left if left < math.inf else 0.0
        try:
            exchange = core.channel.exchange(
                lambda _, id_: wire.Reserve(id_, self._mountpoint, keys, sizes, self._if_exists, ttl),
                deadline,
            )
        except BaseException:
            fds_closed()
            raise
        marks = begin, asked, perf_counter()
        point = exchange.link.mountpoint(self._mountpoint) or _NO_POINT
        writing = Writing(core.setters, core.channel.transfers, fds_closed, point, self._lanes)
        self._transfer(exchange, writing, part, marks)

    def _transfer(
        self, exchange: Exchange, writing: Writing, part: Sequence[int], marks: tuple[float, float, float]
    ) -> None:
        tokens: list[int] = []  # not committed yet
        try:
            for frame in exchange.frames(self._deadline):
                writing.own(frame.fds)
                tokens += [token for token in getattr(frame.reply, "tokens", ()) if token > 0]
                self._take(exchange, frame, part, writing)
            if not writing.finish(self._deadline):
                raise KvcsTimeoutError("the transfer did not end before the deadline")
            if self._core.meter is not None:
                self._core.meter.phases("put", *marks)
            self._commit(exchange, writing, tokens)
        except BaseException:
            writing.abort()
            raise
        finally:
            exchange.connection.abandon(exchange.waiter)
            if tokens:
                exchange.connection.post(wire.Abort(0, tokens))

    def _take(self, exchange: Exchange, frame: Frame, part: Sequence[int], writing: Writing) -> None:
        """Answer what got no reservation and queue the rest of one frame."""
        reply = frame.reply
        if isinstance(reply, wire.Failure):
            for place in part:
                self.statuses[place] = -abs(reply.errno)
            return
        if not isinstance(reply, wire.ReserveReply):
            raise broken(exchange, type(reply).__name__)
        if frame.cut:
            raise CutShortError
        places, tokens = part[reply.first : reply.first + len(reply.tokens)], reply.tokens
        if len(places) != len(tokens):
            raise broken(exchange, f"{len(tokens)} tokens for {len(places)} keys")
        if tokens and min(tokens) <= 0:
            for place, token in zip(places, tokens, strict=True):
                if token <= 0:
                    self.statuses[place] = self._status(token)
            places = [place for place, token in zip(places, tokens, strict=True) if token > 0]
            tokens = [token for token in tokens if token > 0]
        writing.take(Slots(places, tokens, frame.fds, [self._sources[place] for place in places]))

    def _status(self, status: int) -> int:
        return 0 if status == -errno.EEXIST and self._if_exists == "keep" else status

    def _commit(self, exchange: Exchange, writing: Writing, tokens: list[int]) -> None:
        """Publish what was written whole; `tokens` keeps what is to be aborted."""
        places: list[int] = []
        whole: list[int] = []
        digests: list[bytes] = []
        for slots in writing.slots:
            for place, token, status, digest in zip(
                slots.places, slots.tokens, slots.statuses, slots.digests, strict=True
            ):
                if status:
                    self.statuses[place] = -errno.EIO if status == PENDING else status
                else:
                    places.append(place)
                    whole.append(token)
                    digests.append(digest)
        if not whole:
            return
        connection, begin = exchange.connection, perf_counter()
        commit = wire.Commit(connection.next_id(), whole, b"".join(digests), self._if_exists)
        waiter = connection.request(commit, self._deadline)
        kept = set(tokens) - set(whole)
        tokens[:] = kept  # the rest is in the daemon's hands now
        try:
            reply = connection.next_frame(waiter, self._deadline).reply
        finally:
            connection.abandon(waiter)
        if isinstance(reply, wire.Failure):
            statuses = [-abs(reply.errno)] * len(whole)
        elif isinstance(reply, wire.CommitReply) and len(reply.statuses) == len(whole):
            statuses = reply.statuses
        else:
            raise broken(exchange, type(reply).__name__)
        for place, status in zip(places, statuses, strict=True):
            self.statuses[place] = self._status(status)
        if self._core.meter is not None:
            self._core.meter.phase("put", "commit", perf_counter() - begin)
