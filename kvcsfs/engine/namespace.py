"""Namespace: what a mountpoint's file tree has beyond its keys. Pure; lives in the snapshot alone.

Directories that somebody made, empty files, and owner, mode and times where they aren't the usual ones.
"""

from __future__ import annotations

import heapq
import stat
from collections.abc import Iterator
from typing import Any

from sortedcontainers import SortedDict

from kvcsfs.engine.index import children_of

# "mode", "uid", "gid", "atime_ns", "mtime_ns", "ctime_ns", as far as they were set
Attributes = dict[str, int]


class Namespace:
    """The tree's own records, over plain dicts that stay live in `data`.

    Invariant: a file is in at most one of `_pending` (its first writer is at work; not in the snapshot, so that a
    crash leaves no half-written file), `_empty` and `_values` (a key with a value); `_names` has the first two.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self._made: dict[str, Attributes] = data.setdefault("directories", {})
        self._empty: dict[str, Attributes] = data.setdefault("empty", {})
        self._values: dict[str, Attributes] = data.setdefault("values", {})
        self._pending: dict[str, Attributes] = {}
        self._directories: SortedDict[str, bool] = SortedDict.fromkeys(self._made, True)
        self._names: SortedDict[str, bool] = SortedDict.fromkeys(self._empty, True)

    # -- looking

    def is_directory(self, path: str) -> bool:
        """Whether `path`, which ends with a slash, was made, or something that isn't a key lies below it."""
        return _is_below(self._directories, path) or _is_below(self._names, path)

    def is_file(self, key: str) -> bool:
        """Whether there is a file without a value: empty, or being written for the first time."""
        return key in self._names

    def knows(self, key: str) -> bool:
        """Whether anything is recorded of a file."""
        return key in self._values or key in self._names

    def files(self) -> list[str]:
        """Every file of which something is recorded."""
        return [*self._names, *self._values]

    def attributes(self, key: str) -> Attributes:
        """What was set on a file."""
        return self._values.get(key) or self._pending.get(key) or self._empty.get(key) or {}

    def directory_attributes(self, path: str) -> Attributes:
        """What was set on a directory."""
        return self._made.get(path, {})

    def children(self, path: str, after: str | None) -> Iterator[str]:
        """Yield names in a directory that follow `after`, as `Index.children` does."""
        directories = (name for name in children_of(self._directories, path, after) if name)
        merged = heapq.merge(directories, children_of(self._names, path, after))
        last = None
        for name in merged:
            if name != last:
                yield name
            last = name

    # -- directories

    def make(self, path: str, attributes: Attributes) -> None:
        """Record a directory, with attributes that replace what it had."""
        self._made[path] = attributes
        self._directories[path] = True

    def changed(self, path: str, now_ns: int) -> None:
        """Something in a directory came or went through the mount: from now on it stays without keys, too."""
        if path:
            self.make(path, {**self._made.get(path, {}), "mtime_ns": now_ns, "ctime_ns": now_ns})

    def set_directory(self, path: str, changes: Attributes) -> None:
        """Set attributes of a directory, which makes it one that stays."""
        self.make(path, {**self._made.get(path, {}), **changes})

    def remove_directory(self, path: str) -> None:
        """Forget a directory."""
        self._made.pop(path, None)
        self._directories.pop(path, None)

    def move_directory(self, old: str, new: str) -> None:
        """Rename a directory that has nothing in it."""
        self.make(new, self._made.get(old, {}))
        self.remove_directory(old)

    # -- files

    def create(self, key: str, attributes: Attributes) -> None:
        """Record a file that somebody begins to write."""
        self._pending[key] = attributes
        self._names[key] = True

    def set_file(self, key: str, changes: Attributes) -> None:
        """Set attributes of a file."""
        for files in (self._pending, self._empty, self._values):
            if key in files:
                files[key] = {**files[key], **changes}
                return
        self._values[key] = changes

    def wrote(self, key: str) -> None:
        """Somebody writes to a file: it loses the bits that make it run as its owner or group. Source: inode(7)."""
        mode = self.attributes(key).get("mode", 0)
        if mode & (stat.S_ISUID | stat.S_ISGID):
            self.set_file(key, {"mode": mode & ~(stat.S_ISUID | stat.S_ISGID)})

    def set_empty(self, key: str, written_ns: int) -> None:
        """A file is closed, and has no bytes."""
        times = {"mtime_ns": written_ns, "atime_ns": written_ns, "ctime_ns": written_ns}
        self._empty[key] = {**times, **_since(written_ns, self.forget(key))}
        self._names[key] = True

    def set_value(self, key: str, written_ns: int) -> None:
        """A file has a value now, of which the last byte was written at some time."""
        if attributes := _since(written_ns, self.forget(key)):
            self._values[key] = attributes

    def forget(self, key: str) -> Attributes:
        """Drop a file's record, and return what was set on it."""
        self._names.pop(key, None)
        found: Attributes = {}
        for files in (self._pending, self._empty, self._values):
            found = files.pop(key, found)
        return found

    def move_file(self, old: str, new: str) -> None:
        """Rename a file; what was recorded of `new` is gone."""
        self.forget(new)
        for files in (self._pending, self._empty, self._values):
            if old in files:
                files[new] = files.pop(old)
        if old in self._names:
            del self._names[old]
            self._names[new] = True

    def check(self) -> None:
        """Assert the invariant."""
        assert set(self._directories) == set(self._made)
        assert set(self._names) == set(self._pending) | set(self._empty)
        assert not set(self._pending) & set(self._empty)
        assert not set(self._names) & set(self._values)


def _is_below(names: SortedDict[str, bool], path: str) -> bool:
    """Whether one of the names starts with `path`; it may be that, as the last component of a key may be empty."""
    if not names:
        return False
    i = names.bisect_left(path)
    return i < len(names) and bool(names.peekitem(i)[0].startswith(path))


def _since(written_ns: int, attributes: Attributes) -> Attributes:
    """What stays of attributes: a write sets new times, so only times that were set after it count."""
    if attributes.get("ctime_ns", 0) >= written_ns:
        return attributes
    return {name: value for name, value in attributes.items() if not name.endswith("time_ns")}
