"""Index: key -> entry, ordered by key, with recursive counters for every directory."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

from sortedcontainers import SortedDict

from kvcsfs.engine.entry import Entry, charge
from kvcsfs.engine.keys import directory

MAX_PENDING = 256


class Directory:
    """Counters of everything below one directory."""

    __slots__ = ("charged_bytes", "entries", "parent", "path", "value_bytes")

    def __init__(self, path: str, parent: Directory | None) -> None:
        self.path = path
        self.parent = parent
        self.entries = 0
        self.value_bytes = 0
        self.charged_bytes = 0


class Index:
    """Entries by key. Pure.

    Invariant: every directory's counters, with the changes in `_pending` applied, are the sums over the keys that
    start with it; a directory without keys has no counters, but for the root.
    """

    def __init__(self) -> None:
        self._entries: SortedDict[str, Entry] = SortedDict()
        self._directories: dict[str, Directory] = {"": Directory("", None)}
        self._pending: dict[
            str, list[int]
        ] = {}  # changes by directory, summed: a batch shares its walk to the root
        self.get = self._entries.get  # the hot call, bound once: key -> Entry | None

    def __len__(self) -> int:
        return len(self._entries)

    def load(self, entries: Collection[Entry]) -> None:
        """Add many entries of new keys at once: sorts once instead of inserting each."""
        self._entries.update({entry.key: entry for entry in entries})
        for entry in entries:
            self._count(entry, 1)

    def add(self, entry: Entry) -> None:
        """Add an entry whose key is free."""
        assert entry.key not in self._entries
        self._entries[entry.key] = entry
        self._count(entry, 1)

    def remove(self, entry: Entry) -> None:
        """Take an entry out."""
        del self._entries[entry.key]
        self._count(entry, -1)

    def _count(self, entry: Entry, sign: int) -> None:
        key = entry.key
        path = key[: key.rfind("/") + 1]
        change = self._pending.get(path)
        if change is None:
            change = self._pending[path] = [0, 0, 0]
        change[0] += sign
        change[1] += sign * entry.size
        change[2] += sign * charge(entry.size)
        if len(self._pending) > MAX_PENDING:
            self._settle()

    def _settle(self) -> None:
        """Carry the pending changes to every directory above them."""
        pending, self._pending = self._pending, {}
        touched: list[Directory] = []
        for path, (entries, value_bytes, charged_bytes) in pending.items():
            touched.append(self._directory(path))
            node: Directory | None = touched[-1]
            while node is not None:
                node.entries += entries
                node.value_bytes += value_bytes
                node.charged_bytes += charged_bytes
                node = node.parent
        for empty in touched:
            while not empty.entries and empty.parent:
                self._directories.pop(empty.path, None)
                empty = empty.parent  # noqa: PLW2901 a walk up to the first that isn't empty

    def _directory(self, path: str) -> Directory:
        node = self._directories.get(path)
        if node is None:
            node = self._directories[path] = Directory(path, self._directory(directory(path[:-1])))
        return node

    def usage(self, prefix: str) -> tuple[int, int, int]:
        """Entries, value bytes and charged bytes of all keys that start with `prefix`.

        O(1) for a directory but for pending changes, else O(keys).
        """
        self._settle()
        node = self._directories.get(prefix)
        if node is not None:
            return node.entries, node.value_bytes, node.charged_bytes
        if prefix.endswith("/"):
            return 0, 0, 0
        count = value_bytes = charged_bytes = 0
        for entry in self.entries(prefix):
            count += 1
            value_bytes += entry.size
            charged_bytes += charge(entry.size)
        return count, value_bytes, charged_bytes

    def is_directory(self, path: str) -> bool:
        """Whether keys lie below `path`, which is "" or ends with a slash."""
        self._settle()
        return path in self._directories

    def entries(self, prefix: str = "", after: str = "") -> Iterator[Entry]:
        """Yield the entries whose keys start with `prefix` and are greater than `after`, in key order."""
        inclusive = (after < prefix, True) if after or prefix else (True, True)
        for key in self._entries.irange(max(prefix, after), None, inclusive=inclusive):
            if not key.startswith(prefix):
                return
            yield self._entries[key]

    def page(self, prefix: str, after: str, limit: int) -> list[Entry]:
        """At most `limit` of `entries(prefix, after)`."""
        return list(islice(self.entries(prefix, after), limit))

    def children(self, path: str, after: str | None = None) -> Iterator[str]:
        """Yield the names directly in directory `path` that follow `after`, in key order; directories end with "/".

        So a name that is a key and a directory comes twice. O(children * log n): the scan jumps past a subdirectory
        instead of walking it. Safe against changes only while it isn't suspended: resume by the last name.
        """
        return children_of(self._entries, path, after)

    def check(self) -> None:
        """Assert the invariant."""
        self._settle()
        sums: dict[str, list[int]] = {"": [0, 0, 0]}
        for key, entry in self._entries.items():
            assert key == entry.key
            path: str | None = directory(key)
            while path is not None:
                total = sums.setdefault(path, [0, 0, 0])
                total[0] += 1
                total[1] += entry.size
                total[2] += charge(entry.size)
                path = directory(path[:-1]) if path else None
        have = {p: [d.entries, d.value_bytes, d.charged_bytes] for p, d in self._directories.items()}
        assert have == sums, (have, sums)


def children_of(entries: SortedDict[str, Any], path: str, after: str | None = None) -> Iterator[str]:
    """Do what `Index.children` does, for any dict ordered by key."""
    keys = entries.keys()
    if after is None:
        i = entries.bisect_left(path)
    elif after.endswith("/"):
        i = entries.bisect_left(path + after[:-1] + "0")  # "0" follows "/"
    else:
        i = entries.bisect_right(path + after)
    while i < len(keys) and keys[i].startswith(path):
        name, below, _ = keys[i][len(path) :].partition("/")
        yield name + below
        i = entries.bisect_left(path + name + "0") if below else i + 1
