"""What the calls of one client share, and the calls without data: query, delete, check."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvcsfs import wire
from kvcsfs.errors import KvcsError, KvcsUnavailableError
from kvcsfs.sdk.channel import Channel, Exchange, Link
from kvcsfs.sdk.deadline import Deadline
from kvcsfs.sdk.transfer import PENDING
from kvcsfs.sdk.workers import Pool

if TYPE_CHECKING:
    from kvcsfs.sdk.metrics import Meter


class CutShortError(Exception):
    """The process has no room for the descriptors of a reply: ask for less at once."""


@dataclass(slots=True)
class Core:
    channel: Channel
    getters: Pool
    setters: Pool
    simple: Pool
    max_keys: int
    max_key_size: int
    max_value_size: int
    verify_reads: bool
    meter: Meter | None


def open_places(statuses: Sequence[int]) -> Sequence[int]:
    """The places that the daemon is to be asked about."""
    if statuses.count(PENDING) == len(statuses):
        return range(len(statuses))
    return [i for i, status in enumerate(statuses) if status == PENDING]


def give_up(statuses: list[int], status: int) -> None:
    """Set every place that has no answer yet."""
    for i, old in enumerate(statuses):
        if old == PENDING:
            statuses[i] = status


def pick(keys: list[str], places: Sequence[int]) -> list[str]:
    if isinstance(places, range):
        return keys[places.start : places.stop]
    return [keys[i] for i in places]


def broken(exchange: Exchange, why: str) -> KvcsUnavailableError:
    """A daemon whose answers make no sense is as good as none: the connection ends."""
    error = KvcsUnavailableError(f"the daemon's answer makes no sense: {why}")
    exchange.connection.fail(error)
    return error


def key_limit(core: Core, link: Link) -> int:
    return max(1, min(core.max_keys, link.hello.max_keys))


def ask(
    core: Core,
    keys: list[str],
    statuses: list[int],
    make: Callable[[int, list[str]], wire.Request],
    deadline: Deadline,
) -> None:
    """Send the open keys in as many requests as it takes, and set their statuses (a query's size included).

    Raises:
        KvcsTimeoutError, KvcsUnavailableError: the statuses that came before stay.
    """

    def request(sent: list[str], _link: Link, id_: int) -> wire.Request:
        return make(id_, sent)

    places = open_places(statuses)
    at = 0
    while at < len(places):
        part = places[at : at + key_limit(core, core.channel.link(deadline))]
        exchange = core.channel.exchange(partial(request, pick(keys, part)), deadline)
        reply = exchange.first.reply
        if isinstance(reply, wire.Failure):
            answers = [-abs(reply.errno)] * len(part)
        elif isinstance(reply, wire.QueryReply):
            answers = reply.sizes
        elif isinstance(reply, wire.DeleteReply | wire.CheckReply):
            answers = reply.statuses
        else:
            raise broken(exchange, type(reply).__name__)
        if len(answers) != len(part):
            raise broken(exchange, f"{len(answers)} statuses for {len(part)} keys")
        if isinstance(part, range):
            statuses[part.start : part.stop] = answers
        else:
            for place, answer in zip(part, answers, strict=True):
                statuses[place] = answer
        at += len(part)


def nothing_done(statuses: Sequence[int], places: Sequence[int]) -> bool:
    return all(statuses[place] == PENDING for place in places)


def report_wrong(core: Core, mountpoint: int, keys: list[str], deadline: Deadline) -> None:
    """Have the daemon look at values that failed their checksum here; it drops what is wrong."""
    with contextlib.suppress(KvcsError):
        ask(core, keys, [PENDING] * len(keys), lambda id_, sent: wire.Check(id_, mountpoint, sent), deadline)
