"""Session: what one connection, or one mount, holds of the store: leases and reservations. Plain data."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcsfs.engine.entry import Entry

if TYPE_CHECKING:
    from kvcsfs.engine.volume import Volume


@dataclasses.dataclass(slots=True)
class Lease:
    """The pins of one batch. They end by release or with the session, never by a clock."""

    volume: Volume
    entries: list[Entry]
    renew: bool


@dataclasses.dataclass(slots=True, eq=False)
class Staged:
    """One value on its way in. `entry` isn't in the index yet; its charge is what is reserved.

    `fd` is the writable descriptor, owned by whoever got this from the engine. `token` names the reservation within
    its session; `expires` is a time of trio's clock.
    """

    volume: Volume
    entry: Entry
    fd: int
    token: int = 0
    expires: float = float("inf")

    @property
    def charged(self) -> int:
        """Bytes reserved for it."""
        return self.entry.charged


class Session:
    """Holds leases and reservations of one peer until it gives them back or goes.

    `user` is the uid that may share descriptors; `quota_share` bounds what it reserves at once, as a fraction of a
    mountpoint's capacity, 0 for no bound.
    """

    def __init__(self, user: int, quota_share: int = 4) -> None:
        self.user = user
        self.leases: dict[int, Lease] = {}
        self.staged: dict[int, Staged] = {}
        self.reserved = 0
        self.closed = False
        self._quota_share = quota_share
        self._tokens = itertools.count(1)

    def admit(self, charges: Sequence[int], capacity: int) -> int:
        """Count bytes to this session, in order, up to its quota; returns how many fit.

        One value alone may be larger.
        """
        limit = capacity // self._quota_share if self._quota_share else 0
        total = sum(charges)
        if not limit or self.reserved + total <= limit:
            self.reserved += total
            return len(charges)
        for i, charged in enumerate(charges):
            if limit and self.reserved and self.reserved + charged > limit:
                return i
            self.reserved += charged
        return len(charges)

    def add(self, *reservations: Staged, expires: float = float("inf")) -> None:
        """Hold reservations whose bytes are counted."""
        table, tokens = self.staged, self._tokens
        for staged in reservations:
            staged.token = token = next(tokens)
            staged.expires = expires
            table[token] = staged

    def pop(self, token: int) -> Staged | None:
        """Give a reservation up to the step that ends it; None if there is none."""
        staged = self.staged.pop(token, None)
        if staged is not None:
            self.reserved -= staged.charged
        return staged
