"""Order of use: a doubly linked list through the entries themselves, 16 bytes an entry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvcsfs.engine.entry import Entry


class Lru:
    """Entries from the least to the most recently used. Pure.

    Invariant: `older`/`newer` links form one ring through a sentinel; an entry outside has None in both.
    """

    def __init__(self) -> None:
        self._ring = ring = Entry("", -1, 0, b"", 0, 0.0)
        ring.older = ring.newer = ring

    def add(self, entry: Entry) -> None:
        """Append as the most recently used."""
        ring = self._ring
        last = ring.older
        assert last is not None
        entry.older, entry.newer = last, ring
        last.newer = ring.older = entry

    def remove(self, entry: Entry) -> None:
        """Take an entry out of the list."""
        older, newer = entry.older, entry.newer
        assert older is not None and newer is not None
        older.newer, newer.older = newer, older
        entry.older = entry.newer = None

    def touch(self, entries: Iterable[Entry]) -> None:
        """Make entries the most recently used, in the order given; those that have left are passed over."""
        ring = self._ring
        for entry in entries:
            older, newer = entry.older, entry.newer
            if newer is None or newer is ring or older is None:
                continue
            older.newer, newer.older = newer, older
            last = ring.older
            assert last is not None
            entry.older, entry.newer = last, ring
            last.newer = ring.older = entry

    def __iter__(self) -> Iterator[Entry]:
        """Yield from the least recently used on; the yielded entry may be removed meanwhile."""
        entry = self._ring.newer
        while entry is not self._ring:
            assert entry is not None
            following = entry.newer
            yield entry
            entry = following

    def check(self) -> None:
        """Assert the invariant."""
        entry = self._ring
        while True:
            following = entry.newer
            assert following is not None and following.older is entry
            entry = following
            if entry is self._ring:
                return
