"""The caller's memory: checks before any byte moves, pieces of it, and reusable page-aligned buffers."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeAlias, cast

from xxhash import xxh3_128, xxh3_128_digest

from kvcsfs.sdk.deadline import wait_seconds
from kvcsfs.sdk.results import Buffer

Target: TypeAlias = "bytearray | memoryview | list[memoryview]"  # bytes, C-contiguous, writable
Source: TypeAlias = "bytes | bytearray | memoryview | list[memoryview]"

# A bytearray that isn't zero-filled: filling it would fault its pages in under the interpreter lock.
# Source: CPython, `PyByteArray_FromStringAndSize(NULL, n)`.
_new_bytearray = ctypes.pythonapi.PyByteArray_FromStringAndSize
_new_bytearray.restype = ctypes.py_object
_new_bytearray.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t]


def uninitialised(size: int) -> bytearray:
    """A bytearray of arbitrary content; the caller overwrites all of it or drops it."""
    made: bytearray = _new_bytearray(None, size)
    return made


def as_bytes(buffer: Buffer, what: str) -> memoryview:
    """View a buffer as plain bytes.

    Raises:
        TypeError: no buffer. ValueError: its memory is not C-contiguous, or holds references to objects.
    """
    try:
        view = memoryview(buffer)
    except TypeError:
        raise TypeError(f"{what} must be a buffer of bytes, not {type(buffer).__name__}") from None
    if not view.c_contiguous:
        raise ValueError(f"{what} must be contiguous in memory")
    if view.format == "B" and view.ndim == 1:
        return view
    if "O" in re.sub(":.*?:", "", view.format):  # of a struct, the names of its fields stand in colons
        raise ValueError(f"{what} has elements of format {view.format!r}, which are no bytes but objects")
    if not view.nbytes:  # cast() refuses it
        return memoryview(b"" if view.readonly else bytearray())
    return view.cast("B")


def _writable(buffer: Buffer, what: str) -> memoryview:
    view = as_bytes(buffer, what)
    if view.readonly:
        raise ValueError(f"{what} must be writable")
    return view


def check_targets(buffers: Sequence[Buffer | Sequence[Buffer]]) -> list[Target]:
    """Prepare buffers to read into; a list or tuple of buffers stands for one that is cut into pieces.

    Raises:
        TypeError: no buffer. ValueError: read-only, not contiguous, or two of them share memory.
    """
    kinds = set(map(type, buffers))
    if kinds == {bytearray}:  # a common case: distinct objects are distinct memory
        if len(set(map(id, buffers))) != len(buffers):
            raise ValueError("a buffer is given twice")
        return list(cast("Sequence[bytearray]", buffers))
    targets: list[Target] = []
    pieces = _plain_views(buffers, writable=True) if not kinds & {list, tuple} else []
    if pieces:
        targets = list(pieces)
    else:
        for i, buffer in enumerate(buffers):
            views = _writable_views(buffer, f"buffers[{i}]")
            targets.append(views if isinstance(buffer, list | tuple) else views[0])
            pieces += views
    _check_distinct(pieces)
    return targets


def _plain_views(buffers: Sequence[Any], writable: bool) -> list[memoryview]:
    """Views of buffers of bytes, by one look at all; empty if one of them needs a look of its own."""
    try:
        views = [memoryview(buffer) for buffer in buffers]
    except TypeError:
        return []
    formats = {view.format for view in views}
    if not formats <= {"B", "<B"} or not all(view.c_contiguous and view.ndim == 1 for view in views):
        return []
    if writable and any(view.readonly for view in views):
        return []
    return [view.cast("B") for view in views] if "<B" in formats else views  # as arrays of ctypes name it


def _writable_views(buffer: Buffer | Sequence[Buffer], what: str) -> list[memoryview]:
    if isinstance(buffer, list | tuple):
        return _plain_views(buffer, writable=True) or [
            _writable(piece, f"{what}[{j}]") for j, piece in enumerate(buffer)
        ]
    return [_writable(cast("Buffer", buffer), what)]  # which refuses any other sequence


def _check_distinct(views: list[memoryview]) -> None:
    owners = [view.obj for view in views]
    if set(map(type, owners)) <= _OWNERS and len(set(map(id, owners))) == len(owners):
        return  # without a look at addresses, which takes longer
    addressof, from_buffer, end = ctypes.addressof, ctypes.c_char.from_buffer, 0
    views = list(filter(None, views))  # empty ones have no address
    for address, size in sorted(
        zip([addressof(from_buffer(v)) for v in views], map(len, views), strict=True)
    ):
        if address < end:
            raise ValueError("two buffers share memory, or a buffer is given twice")
        end = address + size


def check_source(value: Buffer | Sequence[Buffer], what: str) -> Source:
    """Prepare a value to write: one buffer, or a list or tuple of segments. Raises as `as_bytes` does."""
    if type(value) is bytes or type(value) is bytearray:
        return value
    if isinstance(value, list | tuple):
        return _plain_views(value, writable=False) or [
            as_bytes(segment, f"{what}[{j}]") for j, segment in enumerate(value)
        ]
    return as_bytes(cast("Buffer", value), what)  # which refuses any other sequence


def size_of(memory: Target | Source) -> int:
    return sum(map(len, memory)) if type(memory) is list else len(memory)


def views_of(memory: Target | Source) -> list[memoryview]:
    return memory if isinstance(memory, list) else [memoryview(memory)]


def digest_of(memory: Target | Source) -> bytes:
    """xxh3-128 of the bytes, joined."""
    if not isinstance(memory, list):
        return xxh3_128_digest(memory)
    hasher = xxh3_128()
    for view in memory:
        hasher.update(view)
    return hasher.digest()


def cut(views: list[memoryview], start: int, size: int, limit: int = sys.maxsize) -> list[memoryview]:
    """The part of joined views from `start` on: `size` bytes, or less where it would take over `limit` views."""
    out: list[memoryview] = []
    for view in views:
        if start >= len(view):
            start -= len(view)
            continue
        piece = view[start : start + size]
        out.append(piece)
        size -= len(piece)
        start = 0
        if not size or len(out) == limit:
            break
    return out


class BufferPool:
    """Page-aligned buffers to read into, used again and again: their memory is there before the first read.

    Invariant: every buffer is free, out with one `take`, or returned while a worker still reads into it: direct I/O
    goes straight into such memory, and a read whose call has timed out can't be called back.
    """

    def __init__(self, count: int, size: int) -> None:
        """Make `count` buffers of `size` bytes each. Raises ValueError: either is below 1."""
        if count < 1 or size < 1:
            raise ValueError(f"a pool needs at least 1 buffer of at least 1 byte, not {count} of {size}")
        self.count, self.size = count, size
        self._returned = threading.Condition()
        self._free = [Pages.make(self, self.size) for _ in range(count)]

    @contextmanager
    def take(self, count: int, timeout_s: float | None = None) -> Iterator[list[memoryview]]:
        """Lend buffers for a `with` block, waiting for others to return theirs; don't use them after it.

        Raises:
            ValueError: more than the pool has. TimeoutError: they were not returned in time.
            OSError: no memory for what `grow` asked for; the pool has its buffers still.
        """
        if not 0 <= count <= self.count:
            raise ValueError(f"the pool has {self.count} buffers, not {count}")
        with self._returned:
            if not self._returned.wait_for(lambda: len(self._free) >= count, wait_seconds(timeout_s)):
                raise TimeoutError(f"{count} buffers were not free within {timeout_s} s")
            for i in range(len(self._free) - count, len(self._free)):
                if len(self._free[i]) < self.size:
                    self._free[i] = Pages.make(self, self.size)  # before any is taken, as it may fail
            taken = [self._free.pop() for _ in range(count)]
            for pages in taken:
                pages.returned = False
        try:
            yield [memoryview(pages)[: self.size] for pages in taken]
        finally:
            with self._returned:
                for pages in taken:
                    pages.returned = True
                    self._collect(pages)

    def grow(self, size: int) -> None:
        """Make buffers at least this large, say after -ENOSPC; those that are out follow later."""
        with self._returned:
            self.size = max(self.size, size)

    @contextmanager
    def use(self, pages: Pages) -> Iterator[None]:
        """Keep a buffer out of `take` while a worker reads into it."""
        with self._returned:
            pages.readers += 1
        try:
            yield
        finally:
            with self._returned:
                pages.readers -= 1
                self._collect(pages)

    def _collect(self, pages: Pages) -> None:
        if pages.returned and not pages.readers:
            pages.returned = False
            self._free.append(pages)
            self._returned.notify_all()


class Pages(mmap.mmap):
    """One buffer of a pool: a mapping of its own, so that memory can't overlap and is aligned."""

    pool: BufferPool
    readers = 0
    returned = False

    @classmethod
    def make(cls, pool: BufferPool, size: int) -> Self:
        """Map whole pages, already there: the first read pays no page fault."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        pages = cls(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, flags=flags)
        pages.pool = pool
        return pages


_OWNERS = {bytearray, mmap.mmap, Pages}  # of memory that no other object has
