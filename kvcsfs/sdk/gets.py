"""A batch get: open, transfer, release."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from functools import partial
from time import perf_counter

from kvcsfs import wire
from kvcsfs.errors import KvcsTimeoutError
from kvcsfs.sdk.buffers import Target
from kvcsfs.sdk.channel import Exchange
from kvcsfs.sdk.connection import Frame
from kvcsfs.sdk.core import (
    Core,
    CutShortError,
    broken,
    give_up,
    key_limit,
    nothing_done,
    open_places,
    pick,
    report_wrong,
)
from kvcsfs.sdk.deadline import Deadline
from kvcsfs.sdk.keys import check_keys
from kvcsfs.sdk.reading import Hits, Reading

log = logging.getLogger("kvcs")

_NO_POINT = wire.MountpointInfo(0, 0)


class Get:
    """One call. `statuses`, `data` (when memory is allocated) and `needed` are its result, by place in the batch."""

    def __init__(
        self,
        core: Core,
        keys: list[str],
        targets: list[Target] | None,
        deadline: Deadline,
        mountpoint: int,
        renew: bool,
    ) -> None:
        self._core, self._keys, self._targets = core, keys, targets
        self._deadline, self._mountpoint, self._renew = deadline, mountpoint, renew
        self.statuses = check_keys(keys, core.max_key_size)
        self.data: list[bytearray | None] = [None] * len(keys) if targets is None else []
        self.needed: dict[int, int] = {}
        self._wrong: list[int] = []

    def run(self) -> None:
        """Raises KvcsTimeoutError if nothing was done in time, KvcsUnavailableError if there is no daemon."""
        places = open_places(self.statuses)
        try:
            self._run_parts(places)
        except KvcsTimeoutError:
            if nothing_done(self.statuses, places):
                raise
            give_up(self.statuses, -errno.ETIMEDOUT)
        give_up(self.statuses, -errno.EIO)
        if self._wrong:
            log.warning("%d values of %d failed their checksum", len(self._wrong), len(self._keys))
            report_wrong(self._core, self._mountpoint, [self._keys[i] for i in self._wrong], self._deadline)

    def _run_parts(self, places: Sequence[int]) -> None:
        at, limit = 0, self._core.channel.max_fds
        while at < len(places):
            count = min(limit, key_limit(self._core, self._core.channel.link(self._deadline)))
            part = places[at : at + count]
            try:
                self._run_part(part)
            except CutShortError:
                if len(part) > 1:
                    limit = len(part) // 2
                    continue
                self.statuses[part[0]] = -errno.EMFILE
            at += len(part)

    def _run_part(self, part: Sequence[int]) -> None:
        core, gate, deadline, begin = self._core, self._core.channel.fds, self._deadline, perf_counter()
        taken = gate.take(len(part), deadline)
        if not taken:
            raise KvcsTimeoutError("too many descriptors in use until the deadline")
        asked = perf_counter()
        sent = pick(self._keys, part)
        try:
            exchange = core.channel.exchange(
                lambda _, id_: wire.Open(id_, self._mountpoint, sent, self._renew), deadline
            )
        except BaseException:
            gate.give(taken)
            raise
        opened = perf_counter()
        point = exchange.link.mountpoint(self._mountpoint) or _NO_POINT
        reading = Reading(
            core.getters, core.channel.transfers, partial(gate.give, taken), self.statuses, self.data, point
        )
        self._transfer(exchange, reading, part)
        if core.meter is not None:
            core.meter.phases("get", begin, asked, opened)

    def _transfer(self, exchange: Exchange, reading: Reading, part: Sequence[int]) -> None:
        lease = 0
        try:
            for frame in exchange.frames(self._deadline):
                reading.own(frame.fds)
                lease = getattr(frame.reply, "lease", 0)
                self._take(exchange, frame, part, reading)
            if not reading.finish(self._deadline):
                raise KvcsTimeoutError("the transfer did not end before the deadline")
        except BaseException:
            reading.abort()
            raise
        finally:
            self._wrong += reading.wrong
            self.needed.update(reading.needed)
            if not exchange.connection.abandon(exchange.waiter) and lease:
                exchange.connection.post(wire.Release(0, lease))

    def _take(self, exchange: Exchange, frame: Frame, part: Sequence[int], reading: Reading) -> None:
        """Answer what is no hit and queue the rest of one frame."""
        reply = frame.reply
        if isinstance(reply, wire.Failure):
            for place in part:
                self.statuses[place] = -abs(reply.errno)
            return
        if not isinstance(reply, wire.OpenReply):
            raise broken(exchange, type(reply).__name__)
        if frame.cut:
            raise CutShortError
        places, sizes, fds, checksums = (
            part[reply.first : reply.first + len(reply.sizes)],
            reply.sizes,
            frame.fds,
            reply.checksums,
        )
        if len(places) != len(sizes) or len(checksums) != wire.CHECKSUM_BYTES * len(fds):
            raise broken(exchange, "its columns differ in length")
        if not sizes:
            return
        if min(sizes) <= 0 or max(sizes) > self._core.max_value_size:
            places, sizes, fds, checksums = self._sift(exchange, places, sizes, fds, checksums)
        verify = self._core.verify_reads or any(reply.flags)
        reading.take(Hits(places, sizes, fds, self._pick_targets(places), checksums, verify))

    def _pick_targets(self, places: Sequence[int]) -> list[Target] | None:
        targets = self._targets
        if targets is None:
            return None
        if isinstance(places, range):
            return targets[places.start : places.stop]
        return [targets[place] for place in places]

    def _sift(
        self, exchange: Exchange, places: Sequence[int], sizes: list[int], fds: list[int], checksums: bytes
    ) -> tuple[list[int], list[int], list[int], bytes]:
        """Answer misses, errors and values over this client's limit; return the columns of what is left."""
        limit, statuses, hits, h = self._core.max_value_size, self.statuses, [], 0
        for place, size in zip(places, sizes, strict=True):
            if size <= 0:
                statuses[place] = size
                continue
            if size > limit:
                statuses[place] = -errno.E2BIG
                self.needed[place] = size
            else:
                hits.append((place, size, h))
            h += 1
        if h != len(fds):
            raise broken(exchange, f"{h} hits with {len(fds)} descriptors")
        width = wire.CHECKSUM_BYTES
        return (
            [place for place, _, _ in hits],
            [size for _, size, _ in hits],
            [fds[j] for _, _, j in hits],
            b"".join([checksums[width * j : width * (j + 1)] for _, _, j in hits]),
        )
