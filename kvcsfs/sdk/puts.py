"""A batch put: reserve, transfer, commit. In two parts at once: one's bytes move while the daemon is at the other."""

from __future__ import annotations

import errno
import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter

from kvcsfs import wire
from kvcsfs.errors import KvcsError, KvcsTimeoutError
from kvcsfs.sdk.buffers import Source, size_of
from kvcsfs.sdk.channel import Exchange, Link, charged_bytes
from kvcsfs.sdk.connection import Frame, Waiter
from kvcsfs.sdk.core import Core, CutShortError, broken, give_up, key_limit, open_places, pick
from kvcsfs.sdk.crew import Crew
from kvcsfs.sdk.deadline import Deadline
from kvcsfs.sdk.gates import Gate
from kvcsfs.sdk.keys import check_keys
from kvcsfs.sdk.results import IfExists
from kvcsfs.sdk.transfer import PENDING
from kvcsfs.sdk.writing import Slots, Writing, writers

PARTS_AT_ONCE = 2  # one whose bytes move, and one that the daemon reserves or commits
PART_KEYS = 128  # enough to carry the round trips of a part: 64 KiB x 256 is slower with less (measured)
WHOLE_KEYS = 64  # so few are not worth a second part
_NO_POINT = wire.MountpointInfo(0, 0)


class _Part:
    """Places on their way: reserved, then written, then committed."""

    __slots__ = ("asked", "commit", "exchange", "give_space", "marks", "places", "tokens", "whole", "writing")

    def __init__(
        self,
        places: Sequence[int],
        exchange: Exchange,
        writing: Writing,
        give_space: Callable[[], None],
        marks: tuple[float, float, float],
    ) -> None:
        self.places, self.exchange, self.writing = places, exchange, writing
        self.give_space, self.marks = give_space, marks
        self.tokens: list[int] = []  # to be aborted, unless they are committed
        self.whole: list[int] = []  # the places that are being committed
        self.commit: Waiter | None = None
        self.asked = 0.0


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
        self._parts: deque[_Part] = deque()  # what is under way
        self._at_once, self._part_charge = 1, 0
        self._crew: Crew | None = None
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
        todo = deque([places] if places else [])
        self._at_once = PARTS_AT_ONCE if len(places) > WHOLE_KEYS else 1
        try:
            while todo or self._parts:
                if not (todo and len(self._parts) < self._at_once and self._begin(todo)):
                    self._advance(wants_room=bool(todo))
        except KvcsError:
            for part in [part for part in self._parts if part.commit is not None]:
                with suppress(KvcsError):  # its answer may be there
                    self._committed(part)
            raise
        finally:
            for part in list(self._parts):
                part.writing.abort()
                self._end(part)

    # -- a part's beginning

    def _begin(self, todo: deque[Sequence[int]]) -> bool:
        """Have the next part reserved and its writing begin; False if that must wait for one that is under way."""
        begin, link, rest = perf_counter(), self._core.channel.link(self._deadline), todo[0]
        count = self._cut(rest, link)
        part = rest[:count]
        space, charge = link.gate(self._mountpoint), sum(charged_bytes(self.sizes[place]) for place in part)
        reserved, taken = self._take_share(space, charge, count)
        if not taken:
            return False
        todo.popleft()
        if count < len(rest):
            todo.appendleft(rest[count:])
        give_space = partial(space.give, reserved) if space is not None else _nothing
        try:
            self._reserve(part, give_space, taken, begin)
        except CutShortError:
            if count == 1:
                self.statuses[part[0]] = -errno.EMFILE
            else:
                todo.extendleft((part[count // 2 :], part[: count // 2]))
        return True

    def _cut(self, places: Sequence[int], link: Link) -> int:
        """How many keys the next part has: all at once must fit into what one connection may reserve; at least one."""
        count = min(PART_KEYS, self._core.channel.max_fds, key_limit(self._core, link))
        gate = link.gate(self._mountpoint)
        limit = max(1, gate.limit // self._at_once) if gate is not None else sys.maxsize
        if not self._part_charge:
            charge = sum(charged_bytes(self.sizes[place]) for place in places)
            parts = max(self._at_once, -(-len(places) // count), -(-charge // limit))
            self._part_charge = -(-charge // parts)
        charge = 0
        for i, place in enumerate(places[:count]):
            if charge >= self._part_charge:  # parts are equal
                return i
            charge += charged_bytes(self.sizes[place])
            if charge > limit:
                return max(1, i)
        return min(count, len(places))

    def _take_share(self, space: Gate | None, charge: int, count: int) -> tuple[int, int]:
        """Take what the calls of this client have in common, bytes and descriptors; 0 descriptors if others have it.

        Raises:
            KvcsTimeoutError: they had it until the deadline.
        """
        fds, waits = self._core.channel.fds, not self._parts  # never with what others may be waiting for
        if waits:
            reserved = space.take(charge, self._deadline) if space is not None else charge
            taken = fds.take(count, self._deadline) if reserved else 0
        else:
            reserved = space.try_take(charge) if space is not None else charge
            taken = fds.try_take(count) if reserved else 0
        if not taken:
            if space is not None:
                space.give(reserved)
            if waits:
                raise KvcsTimeoutError(
                    "other calls of this client held the room for this one until the deadline"
                )
        return reserved, taken

    def _reserve(self, places: Sequence[int], give_space: Callable[[], None], fds: int, begin: float) -> None:
        core, asked = self._core, perf_counter()
        keys, sizes = pick(self._keys, places), [self.sizes[place] for place in places]
        left = self._deadline.remaining()
        ttl = left if left < math.inf else 0.0
        try:
            exchange = core.channel.exchange(
                lambda _, id_: wire.Reserve(id_, self._mountpoint, keys, sizes, self._if_exists, ttl),
                self._deadline,
            )
        except BaseException:
            core.channel.fds.give(fds)
            give_space()
            raise
        point = exchange.link.mountpoint(self._mountpoint) or _NO_POINT
        self._crew = self._crew or writers(core.setters, point)
        writing = Writing(self._crew, core.channel.transfers, partial(core.channel.fds.give, fds), point)
        part = _Part(places, exchange, writing, give_space, (begin, asked, perf_counter()))
        self._parts.append(part)
        try:
            for frame in exchange.frames(self._deadline):
                writing.own(frame.fds)
                part.tokens += [token for token in getattr(frame.reply, "tokens", ()) if token > 0]
                self._take(part, frame)
        except CutShortError:
            writing.abort()
            self._end(part)
            raise
        writing.added()

    def _take(self, part: _Part, frame: Frame) -> None:
        """Answer what got no reservation and queue the rest of one frame."""
        reply = frame.reply
        if isinstance(reply, wire.Failure):
            for place in part.places:
                self.statuses[place] = -abs(reply.errno)
            return
        if not isinstance(reply, wire.ReserveReply):
            raise broken(part.exchange, type(reply).__name__)
        if frame.cut:
            raise CutShortError
        places, tokens = part.places[reply.first : reply.first + len(reply.tokens)], reply.tokens
        if len(places) != len(tokens):
            raise broken(part.exchange, f"{len(tokens)} tokens for {len(places)} keys")
        if tokens and min(tokens) <= 0:
            for place, token in zip(places, tokens, strict=True):
                if token <= 0:
                    self.statuses[place] = self._status(token)
            places = [place for place, token in zip(places, tokens, strict=True) if token > 0]
            tokens = [token for token in tokens if token > 0]
        part.writing.take(Slots(places, tokens, frame.fds, [self._sources[place] for place in places]))

    def _status(self, status: int) -> int:
        return 0 if status == -errno.EEXIST and self._if_exists == "keep" else status

    # -- its end

    def _advance(self, *, wants_room: bool) -> None:
        """Wait for what comes next: the oldest part to be written, or committed if that makes room for another."""
        writing = next((part for part in self._parts if part.commit is None), None)
        if writing is None or (wants_room and self._parts[0].commit is not None):
            self._committed(self._parts[0])
        else:
            self._commit(writing)

    def _commit(self, part: _Part) -> None:
        """Wait until a part is written, and have what was written whole published."""
        if not part.writing.finish(self._deadline):
            raise KvcsTimeoutError("the transfer did not end before the deadline")
        if self._core.meter is not None:
            self._core.meter.phases("put", *part.marks)
        whole: list[int] = []
        digests: list[bytes] = []
        for slots in part.writing.slots:
            for place, token, status, digest in zip(
                slots.places, slots.tokens, slots.statuses, slots.digests, strict=True
            ):
                if status:
                    self.statuses[place] = -errno.EIO if status == PENDING else status
                else:
                    part.whole.append(place)
                    whole.append(token)
                    digests.append(digest)
        if not whole:
            self._end(part)
            return
        connection, part.asked = part.exchange.connection, perf_counter()
        commit = wire.Commit(connection.next_id(), whole, b"".join(digests), self._if_exists)
        part.commit = connection.request(commit, self._deadline)
        part.tokens = list(set(part.tokens) - set(whole))  # the others are in the daemon's hands now

    def _committed(self, part: _Part) -> None:
        """Wait until a part is published."""
        assert part.commit is not None
        reply = part.exchange.connection.next_frame(part.commit, self._deadline).reply
        if isinstance(reply, wire.Failure):
            statuses = [-abs(reply.errno)] * len(part.whole)
        elif isinstance(reply, wire.CommitReply) and len(reply.statuses) == len(part.whole):
            statuses = reply.statuses
        else:
            raise broken(part.exchange, type(reply).__name__)
        for place, status in zip(part.whole, statuses, strict=True):
            self.statuses[place] = self._status(status)
        if self._core.meter is not None:
            self._core.meter.phase("put", "commit", perf_counter() - part.asked)
        self._end(part)

    def _end(self, part: _Part) -> None:
        """Give back what a part has."""
        self._parts.remove(part)
        connection = part.exchange.connection
        connection.abandon(part.exchange.waiter)
        if part.commit is not None:
            connection.abandon(part.commit)
        if part.tokens:
            connection.post(wire.Abort(0, part.tokens))
        part.give_space()


def _nothing() -> None:
    """Give back what wasn't taken."""
