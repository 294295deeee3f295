"""Contents: what is in files. Opens, reads, writes and commits them through the engine, one session for the mount.

A file's content is its entry, or its writer while there is one. Handles of one file share both. Every change holds
the file's lock; reads of an entry don't need it.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, TypeVarTuple

import trio
from pyfuse3 import FUSEError

from kvcsfs.engine.engine import MAX_VALUE_BYTES, Engine
from kvcsfs.engine.namespace import Namespace
from kvcsfs.errors import BackingError, CapacityError, KvcsError, NotFoundError
from kvcsfs.fuse.handles import FileHandle
from kvcsfs.fuse.inodes import File, Inodes
from kvcsfs.fuse.writer import Writer

log = logging.getLogger(__name__)

REQUEST_BYTES = 1 << 20  # FUSE asks for no more at once
BRIEF_BYTES = 64 << 10  # so many are written to the page cache faster than a thread is woken
KNOWN_SIZES = 4096

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Contents:
    """Contents of the files of one mount. `namespace` gives that of a mountpoint, to be changed; `peek`, to look."""

    def __init__(
        self,
        engine: Engine,
        inodes: Inodes,
        namespace: Callable[[int], Namespace],
        peek: Callable[[int], Namespace],
    ) -> None:
        self._engine = engine
        self._inodes = inodes
        self._namespace, self._peek = namespace, peek
        self._session = engine.session(user=-1, quota_share=0)
        self._buffer = bytearray(REQUEST_BYTES)
        self.commit_errors = 0
        self._likely: dict[tuple[int, str, str], int] = {}

    async def _thread(self, node: File, job: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run file work in a thread of a file's mountpoint. Raises CapacityError, BackingError."""
        with _backing_errors():
            return await self._engine.work(node.index, job, *args)

    async def _brief(self, node: File, job: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run file work of microseconds. Raises CapacityError, BackingError."""
        with _backing_errors():
            return await self._engine.brief_work(node.index, job, *args)

    # -- handles

    async def open(self, node: File, writable: bool, truncate: bool) -> FileHandle:
        """A handle of a file. ESTALE, which makes the kernel look the path up again, if the content is gone."""
        async with node.lock:
            if node.gone:
                raise FUSEError(errno.ESTALE)
            if not truncate and node.writer is None:
                await self._hold(node)
            handle = FileHandle(node, writable)
            node.opens += 1
            if writable:
                node.writers.add(handle)
                self._unsettle(node)
            if truncate:
                try:
                    await self._truncate(node, 0)
                except BaseException:
                    node.opens -= 1
                    node.writers.discard(handle)
                    raise
        return handle

    async def _hold(self, node: File) -> None:
        """Pin the entry of a file, so that it stays readable whatever happens to its key."""
        if node.lease or node.entry is None:
            return
        opened = await self._engine.open_many(
            self._session, node.index, [node.key], temporaries=True, verify=True
        )
        if opened.errors:
            raise opened.errors[0]
        if opened.entries[0] is not node.entry:
            self._engine.release(self._session, opened.lease)
            raise FUSEError(errno.ESTALE)
        node.lease, node.fd = opened.lease, opened.fds[0]

    def _let_go(self, node: File) -> None:
        if node.lease:
            self._engine.release(self._session, node.lease)
            node.lease, node.fd = 0, -1

    async def release(self, handle: FileHandle) -> None:
        """Close a handle; the last writer's commits. A failure there can't reach the program: it is logged."""
        node = handle.node
        async with node.lock:
            node.opens -= 1
            node.writers.discard(handle)
            try:
                if not node.writers and node.writer is not None:
                    await self._commit(node)
            except KvcsError as exc:
                log.warning("%r was not stored: %s", node.key, exc)
            finally:
                if not node.opens:
                    self._let_go(node)
        self._inodes.drop_unused(node)

    # -- reading

    async def read(self, node: File, offset: int, size: int) -> bytes | memoryview:
        """At most `size` bytes at `offset`.

        The result may be a view of a buffer that the next read reuses: it must be consumed before an await.
        """
        if node.writer is not None or node.lock.locked():
            async with node.lock:
                if node.writer is not None:
                    return await self._thread(node, node.writer.read, offset, size)
        if node.entry is None:
            return b""
        size = min(size, node.entry.size - offset)
        if size <= 0:
            return b""
        view = memoryview(self._buffer)[:size]
        try:
            if os.preadv(node.fd, [view], offset, os.RWF_NOWAIT) == size:
                return view
        except OSError as exc:
            if exc.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
                raise BackingError(f"reading an object file: {exc.strerror}") from exc
        data = await self._thread(node, os.pread, node.fd, size, offset)
        if len(data) < size:
            raise BackingError("an object file is shorter than its value")
        return data

    # -- writing

    async def write(self, handle: FileHandle, offset: int, data: bytes) -> int:
        """Write at `offset`. Raises CapacityError; the content then is as before."""
        node = handle.node
        end = offset + len(data)
        if end > MAX_VALUE_BYTES:
            raise FUSEError(errno.EFBIG)
        async with node.lock:
            handle.flushed = False
            self._unsettle(node)
            writer = await self._grown(node, end)
            if len(data) > BRIEF_BYTES:
                await self._thread(node, writer.put, data, offset)
            else:
                await self._brief(node, writer.put, data, offset)
            if not node.gone:
                self._namespace(node.index).wrote(node.key)
        return len(data)

    async def truncate(self, node: File, size: int, by_path: bool) -> None:
        """Set the size of a file; with no writer open, that is a change of its own. ESTALE as in `open`."""
        if size > MAX_VALUE_BYTES:
            raise FUSEError(errno.EFBIG)
        async with node.lock:
            if by_path and node.gone:
                raise FUSEError(errno.ESTALE)
            if not node.opens:
                await self._hold(node)
            try:
                if node.size != size or node.writer is None:
                    await self._truncate(node, size)
            finally:
                if not node.opens:
                    self._let_go(node)
        self._inodes.drop_unused(node)

    async def _truncate(self, node: File, size: int) -> None:
        if size == 0 and node.writer is None:
            self._begin(node, Writer())
        else:
            writer = await self._grown(node, size)
            await self._thread(node, writer.cut, size)
        if not node.writers:
            await self._commit(node)

    async def _grown(self, node: File, size: int) -> Writer:
        """The writer of a file, with room for `size` bytes. It begins with a copy of the entry, if there is one."""
        writer = node.writer or Writer()
        if writer.staged is None and (size or (node.writer is None and node.entry)):
            likely = self._likely.get(_kind(node), 0)
            writer.staged = await self._engine.stage_file(
                self._session, node.index, node.key, likely if likely >= size else 0
            )
        try:
            assert writer.staged is not None or not size
            if writer.staged is not None:
                copied = node.entry.size if node.writer is None and node.entry is not None else 0
                await self._engine.grow(self._session, writer.staged, max(size, copied))
                if copied:
                    await self._thread(node, writer.copy, node.fd, copied)
        except BaseException:
            if node.writer is None and writer.staged is not None:
                await self._engine.abort_file(self._session, writer.staged)
            raise
        if node.writer is None:
            self._begin(node, writer)
        return writer

    def _begin(self, node: File, writer: Writer) -> None:
        """Give a file its writer. From now on it is there even if the value under its key goes."""
        if not node.gone:
            namespace = self._namespace(node.index)
            namespace.create(node.key, namespace.forget(node.key))
        node.writer = writer

    # -- the end of a writer

    def flushed(self, handle: FileHandle) -> None:
        """A descriptor of a write handle was closed; if that was the last, its release follows soon."""
        node = handle.node
        if handle not in node.writers:
            return
        handle.flushed = True
        if node.writer is not None and not node.gone and all(h.flushed for h in node.writers):
            self._engine.settling(node.index).setdefault(node.key, trio.Event())

    def _unsettle(self, node: File) -> None:
        event = self._engine.settling(node.index).pop(node.key, None)
        if event is not None:
            event.set()

    async def sync(self, node: File) -> None:
        """Commit what was written so far. Raises what makes it fail."""
        async with node.lock:
            if node.writer is not None:
                await self._commit(node)

    async def _commit(self, node: File) -> None:
        """Make a writer's content the file's: as a value, an empty file, or nothing if the name is gone.

        The writer stays until that is done, as whoever looks meanwhile must see its size.
        """
        writer = node.writer
        assert writer is not None
        if node.gone:
            if not node.opens:  # else readable to the last close
                await self._abort(writer)
                node.writer = None
            return
        try:
            if writer.size:
                await self._publish(node, writer)
            else:
                await self._abort(writer)
                await self._empty(node, writer)
        except BaseException:
            self.commit_errors += 1
            self._lose(node)
            raise
        finally:
            node.writer = None
            self._unsettle(node)

    async def _publish(self, node: File, writer: Writer) -> None:
        assert writer.staged is not None
        opened = await self._engine.commit_file(
            self._session, writer.staged, node.key, writer.size, writer.checksum, hold=node.opens > 0
        )
        self._let_go(node)
        node.entry = opened.entries[0]
        if opened.lease:
            node.lease, node.fd = opened.lease, opened.fds[0]
        self._namespace(node.index).set_value(node.key, writer.mtime_ns)
        if len(self._likely) >= KNOWN_SIZES:
            self._likely.clear()
        self._likely[_kind(node)] = writer.size

    async def _empty(self, node: File, writer: Writer) -> None:
        """A file without bytes is no value. The key may hold another's, over which this one was renamed."""
        self._namespace(node.index).set_empty(
            node.key, writer.mtime_ns
        )  # first, so that it is there all along
        self._unsettle(node)  # the delete would wait for us
        await self._delete(node.index, node.key)
        self._let_go(node)
        node.entry = None

    async def _abort(self, writer: Writer) -> None:
        if writer.staged is not None:
            await self._engine.abort_file(self._session, writer.staged)
            writer.staged = None

    def _lose(self, node: File) -> None:
        """A commit failed: the key is as it was, and this node, whose pages the kernel has, is not that."""
        if not node.gone:
            namespace = self._peek(node.index)
            lost = namespace.forget(node.key) if namespace.is_file(node.key) else {}
            self._inodes.lose(node, lost or namespace.attributes(node.key))

    async def _delete(self, index: int, key: str) -> None:
        """Remove a key's value, if it has one. Raises what makes it fail."""
        (failed,) = await self._engine.delete_many(index, [key], temporaries=True)
        if failed is not None and not isinstance(failed, NotFoundError):
            raise failed

    async def remove(self, node: File) -> None:
        """Remove a file whose lock is held."""
        await self._detach(node)
        await self._delete(node.index, node.key)
        self._namespace(node.index).forget(node.key)

    async def _detach(self, node: File) -> None:
        """Take the name from a file: what is written to it now goes with its last handle."""
        self._unsettle(node)
        self._inodes.detach(node, self._peek(node.index).attributes(node.key))
        if node.writer is not None and not node.opens:
            writer, node.writer = node.writer, None
            await self._abort(writer)

    async def rename(self, node: File, key: str, target: File | None) -> None:
        """Move a file to a key, which `target` has so far. Both locks are held. ENOENT if it was evicted meanwhile.

        A writer takes its content there when it commits; until then the key has its old value for the SDK.
        """
        self._unsettle(node)
        if node.writer is None and node.entry is not None:
            try:
                await self._engine.rename(node.index, node.key, key)
            except NotFoundError:
                raise FUSEError(errno.ENOENT) from None
        else:  # the value below the writer, if there is one: its own, or that of a file it was renamed over
            await self._delete(node.index, node.key)
        if target is not None:
            await self._detach(target)
        if node.writer is None and node.entry is None:  # an empty file takes the place of a value
            await self._delete(node.index, key)
        self._namespace(node.index).move_file(node.key, key)

    async def close(self) -> None:
        """Commit what every program has closed, drop what was still being written, and give everything back."""
        for node in self._inodes.open_files():
            async with node.lock:
                if node.writer is None:
                    continue
                if not all(h.flushed for h in node.writers):
                    await self._detach(node)
                    log.info("%r was still being written and is not stored", node.key)
                node.opens = 0
                try:
                    await self._commit(node)
                except KvcsError as exc:
                    log.warning("%r was not stored: %s", node.key, exc)
        await self._engine.close_session(self._session)


def _kind(node: File) -> tuple[int, str, str]:
    """What files of one size have in common: their mountpoint, first component and suffix."""
    _, dot, suffix = node.key[node.key.rfind("/") + 1 :].rpartition(".")
    return node.index, node.key.partition("/")[0], suffix[-16:] if dot else ""


@contextmanager
def _backing_errors() -> Iterator[None]:
    """Turn an OSError of file work into an error of ours."""
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(f"the backing file system is full: {exc.strerror}") from exc
        raise BackingError(f"a staged file: {exc.strerror}") from exc
