"""Descriptors of hot objects, kept ready so that a hit costs no open."""

from __future__ import annotations

from collections.abc import Iterable

from kvcsfs.engine.entry import Entry


class Descriptors:
    """Read-only descriptors by user and entry. Pure: it never closes one, it says which to close.

    Only connections of one user share a descriptor, since they share its open file description. Invariant: an entry
    in here has a descriptor that is open; a pinned one stays in here.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._by_user: dict[int, dict[Entry, int]] = {}

    def of(self, user: int) -> dict[Entry, int]:
        """The live table of a user, oldest first."""
        return self._by_user.setdefault(user, {})

    def __len__(self) -> int:
        return sum(map(len, self._by_user.values()))

    def take(self, entries: Iterable[Entry]) -> list[int]:
        """Forget entries, and return their descriptors to be closed."""
        return [fd for e in entries for table in self._by_user.values() if (fd := table.pop(e, -1)) >= 0]

    def surplus(self) -> list[int]:
        """Forget the oldest descriptors over the limit that nobody uses, and return them to be closed."""
        count = len(self) - self.limit
        if count <= 0:
            return []
        old = [e for table in self._by_user.values() for e in table if not e.pins]
        return self.take(old[: count + self.limit // 8])

    def clear(self) -> list[int]:
        """Forget all."""
        fds = [fd for table in self._by_user.values() for fd in table.values()]
        self._by_user.clear()
        return fds
