"""Writer: the new content of one file, shared by all its write handles. Blocking parts run in a worker thread."""

from __future__ import annotations

import errno
import os
import time

import xxhash

from kvcsfs.engine.session import Staged

COPY_CHUNK = 1 << 20


class Writer:
    """A content being written. `staged` comes with the first byte; without it the file is empty.

    Behind `size` the staged file may hold bytes of another value: they are cut off before anything skips them.
    The checksum streams as long as writes follow one another: `_hashed` bytes are in `_hash`; None once one didn't.
    """

    def __init__(self) -> None:
        self.staged: Staged | None = None
        self.size = 0
        self.mtime_ns = time.time_ns()
        self._hash: xxhash.xxh3_128 | None = xxhash.xxh3_128()
        self._hashed = 0

    @property
    def fd(self) -> int:
        """The staged file's descriptor."""
        assert self.staged is not None
        return self.staged.fd

    @property
    def checksum(self) -> bytes | None:
        """The checksum of the whole content if it is known without reading it."""
        return self._hash.digest() if self._hash is not None and self._hashed == self.size else None

    def put(self, data: bytes | memoryview, offset: int) -> None:
        """Write all of `data`. Raises OSError."""
        if offset > self.size:
            os.ftruncate(self.fd, self.size)
        view = memoryview(data)
        done = 0
        while done < len(view):
            done += os.pwrite(self.fd, view[done:], offset + done)
        if self._hash is not None and offset == self._hashed:
            self._hash.update(view)
            self._hashed += len(view)
        elif offset < self._hashed:
            self._hash = None
        self.size = max(self.size, offset + len(view))
        self.mtime_ns = time.time_ns()

    def copy(self, source: int, size: int) -> None:
        """Begin with the content of another file. Raises OSError."""
        while self.size < size:
            chunk = os.pread(source, min(COPY_CHUNK, size - self.size), self.size)
            if not chunk:
                raise OSError(errno.EIO, f"object file ends at {self.size} of {size} B")
            self.put(chunk, self.size)

    def cut(self, size: int) -> None:
        """Set the size; what is added reads as zeros. Raises OSError."""
        if self.staged is not None:
            os.ftruncate(self.fd, min(size, self.size))
            os.ftruncate(self.fd, size)
        if size == 0:
            self._hash, self._hashed = xxhash.xxh3_128(), 0
        elif size < self._hashed:
            self._hash = None
        self.size = size
        self.mtime_ns = time.time_ns()

    def read(self, offset: int, size: int) -> bytes:
        """At most `size` bytes of the content. Raises OSError."""
        size = max(min(size, self.size - offset), 0)
        if not size or self.staged is None:
            return b""
        return os.pread(self.fd, size, offset).ljust(size, b"\0")
