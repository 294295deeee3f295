"""Access: who may read and write which keys. Pure; both faces ask it.

The rules of the longest prefix that a key starts with decide, and no others; a key without rules is nobody's, but
without any rule at all every peer that may connect may do everything. Root and the daemon's own user may always:
they can read the object files anyway.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeVar

from kvcsfs.config import AccessRule
from kvcsfs.errors import AccessError

R = TypeVar("R")


class Access:
    """The rules in force. `load` replaces them."""

    def __init__(self, rules: Sequence[AccessRule] = ()) -> None:
        self._always = {0, os.geteuid()}
        self.load(rules)

    def load(self, rules: Sequence[AccessRule]) -> None:
        """Take other rules."""
        self.restricted = bool(rules)
        self._rules: dict[str, list[AccessRule]] = {}
        for rule in sorted(rules, key=lambda r: len(r.prefix), reverse=True):
            self._rules.setdefault(rule.prefix, []).append(rule)

    def may(self, uid: int, gids: Collection[int], index: int, key: str, write: bool) -> bool:
        """Whether a peer may read (or write, which deletes too) a key of a mountpoint; the rules are those of all."""
        del index
        if not self.restricted or uid in self._always:
            return True
        return self._grants(self.domain(key), uid, gids, write)

    def may_below(self, uid: int, gids: Collection[int], index: int, prefix: str, write: bool) -> bool:
        """Whether a peer may do it with every key that starts with `prefix`, those of narrower rules too."""
        deeper = [domain for domain in self._rules if domain.startswith(prefix)]
        return self.may(uid, gids, index, prefix, write) and all(
            self.may(uid, gids, index, domain, write) for domain in deeper
        )

    def domain(self, key: str) -> str | None:
        """The prefix whose rules decide about a key; None without any. Slots don't cross from one to another."""
        for prefix in self._rules:
            if key.startswith(prefix):
                return prefix
        return None

    def _grants(self, domain: str | None, uid: int, gids: Collection[int], write: bool) -> bool:
        if domain is None:
            return False
        return any(
            (rule.write if write else rule.read)
            and (rule.users is None or uid in rule.users or not rule.groups.isdisjoint(gids))
            for rule in self._rules[domain]
        )


class Rights:
    """What one peer may do: looked up at each request, since rules can be reloaded."""

    def __init__(self, access: Access, uid: int, gids: Collection[int]) -> None:
        self._access = access
        self._uid, self._gids = uid, frozenset(gids)

    def may(self, index: int, key: str, write: bool) -> bool:
        """Whether the peer may do it with a key."""
        return self._access.may(self._uid, self._gids, index, key, write)

    def need_below(self, index: int, prefix: str, write: bool) -> None:
        """Raise AccessError unless the peer may do it with every key that starts with `prefix`."""
        if not self._access.may_below(self._uid, self._gids, index, prefix, write):
            raise self._refused(prefix, write)

    async def filtered(
        self,
        index: int,
        names: Sequence[str],
        write: bool,
        act: Callable[[list[int]], Awaitable[Sequence[R]]],
    ) -> list[R | AccessError]:
        """Results by position: those of `act`, called with the positions that are permitted, and AccessError."""
        granted = [i for i, name in enumerate(names) if self.may(index, name, write)]
        results: list[R | AccessError] = [self._refused(name, write) for name in names]
        for i, result in zip(granted, await act(granted) if granted else (), strict=True):
            results[i] = result
        return results

    @property
    def restricted(self) -> bool:
        """Whether there are rules at all."""
        return self._access.restricted

    def _refused(self, name: str, write: bool) -> AccessError:
        return AccessError(f"user {self._uid} may not {'write' if write else 'read'} {name!r}")
