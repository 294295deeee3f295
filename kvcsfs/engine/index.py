"""Index: key -> entry, ordered by key, with recursive counters for every directory."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

from sortedcontainers import SortedDict

from kvcsfs.engine.entry import Entry
from kvcsfs.engine.keys import directory

MAX_CHANGED = 256


class Directory:
    """Counters of everything below one directory, and what has changed directly in it since they were summed up."""

    __slots__ = (
        "charged_bytes",
        "charged_change",
        "entries",
        "entries_change",
        "is_changed",
        "parent",
        "path",
        "value_bytes",
        "value_change",
    )

    def __init__(self, path: str, parent: Directory | None) -> None:
        self.path = path
        self.parent = parent
        self.entries = self.value_bytes = self.charged_bytes = 0
        self.entries_change = self.value_change = self.charged_change = 0
        self.is_changed = False


class Index:
    """Entries by key. Pure.

    Invariant: every directory's counters, with the changes of those in `_changed` carried up, are the sums over the
    keys that start with it; a directory without keys has no counters, but for the root.
    """

    def __init__(self) -> None:
        self._entries: SortedDict[str, Entry] = SortedDict()
        self._directories: dict[str, Directory] = {"": Directory("", None)}
        self._changed: list[Directory] = []  # a batch shares its walk to the root
        self.get = self._entries.get  # the hot call, bound once: key -> Entry | None

    def __len__(self) -> int:
        return len(self._entries)

    def load(self, entries: Collection[Entry]) -> None:
        """Add many entries of new keys at once: sorts once instead of inserting each."""
        self._entries.update({entry.key: entry for entry in entries})
        for entry in entries:
            self._join(entry)

    def add(self, entry: Entry) -> None:
        """Add an entry whose key is free."""
        assert entry.key not in self._entries
        self._entries[entry.key] = entry
        self._join(entry)

    def remove(self, entry: Entry) -> None:
        """Take an entry out."""
        del self._entries[entry.key]
        node = entry.directory
        assert node is not None
        entry.directory = None
        node.entries_change -= 1
        node.value_change -= entry.size
        node.charged_change -= entry.charged
        if not node.is_changed:
            self._note(node)

    def drain(self) -> Iterator[Entry]:
        """Take every entry out, the last key first, which is the fastest. The counters are left as they were."""
        while self._entries:
            _, entry = self._entries.popitem()
            entry.directory = None
            yield entry

    def _join(self, entry: Entry) -> None:
        key = entry.key
        path = key[: key.rfind("/") + 1]
        entry.directory = node = self._directories.get(path) or self._directory(path)
        node.entries_change += 1
        node.value_change += entry.size
        node.charged_change += entry.charged
        if not node.is_changed:
            self._note(node)

    def _note(self, node: Directory) -> None:
        node.is_changed = True
        self._changed.append(node)
        if len(self._changed) > MAX_CHANGED:
            self._settle()

    def _settle(self) -> None:
        """Carry the changes to every directory above."""
        changed, self._changed = self._changed, []
        for node in changed:
            entries, value_bytes, charged_bytes = node.entries_change, node.value_change, node.charged_change
            node.entries_change = node.value_change = node.charged_change = 0
            node.is_changed = False
            above: Directory | None = node
            while above is not None:
                above.entries += entries
                above.value_bytes += value_bytes
                above.charged_bytes += charged_bytes
                above = above.parent
        for empty in changed:
            while not empty.entries and empty.parent:
                self._directories.pop(empty.path, None)
                empty = empty.parent  # noqa: PLW2901 a walk up to the first that isn't empty

    def _directory(self, path: str) -> Directory:
        """The counters of a directory, made with those above that are missing: a key may have 1,024 of them."""
        missing: list[str] = []
        while (node := self._directories.get(path)) is None:
            missing.append(path)
            path = directory(path[:-1])
        for below in reversed(missing):
            node = self._directories[below] = Directory(below, node)
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
            charged_bytes += entry.charged
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
                total[2] += entry.charged
                path = directory(path[:-1]) if path else None
        have = {p: [d.entries, d.value_bytes, d.charged_bytes] for p, d in self._directories.items()}
        assert have == sums, (have, sums)


def children_of(entries: SortedDict[str, Any], path: str, after: str | None = None) -> Iterator[str]:
    """Do what `Index.children` does, for any dict ordered by key."""
    start, inclusive = path, True
    if after is not None and after.endswith("/"):
        start += after[:-1] + "0"  # "0" follows "/"
    elif after is not None:
        start, inclusive = start + after, False
    below = "/"
    while below:
        below = ""
        for key in entries.irange(start, None, (inclusive, True)):  # far faster than by position
            if not key.startswith(path):
                return
            name, below, _ = key[len(path) :].partition("/")
            yield name + below
            if below:
                start, inclusive = path + name + "0", True
                break
