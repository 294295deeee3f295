"""What the kernel is told, against a store that runs and a kernel that isn't there."""

import queue

import pytest

pyfuse3 = pytest.importorskip("pyfuse3", exc_type=ImportError)

import trio

from kvcsfs.errors import BackingError
from kvcsfs.fuse.coherence import Coherence
from kvcsfs.fuse.contents import Contents
from kvcsfs.fuse.inodes import File, Inodes
from kvcsfs.fuse.tree import Tree
from tests.stores import config, put, running


class Face:
    """The mount of an engine without a mount: `told` has the names that the kernel must forget."""

    def __init__(self, engine, monkeypatch) -> None:
        self.engine, self.session = engine, engine.session(0)
        self.tree = Tree(engine, Inodes())
        self.contents = Contents(engine, self.tree.inodes, self.tree.namespace)
        self.coherence = Coherence(self.tree)
        self.told: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        monkeypatch.setattr(pyfuse3, "invalidate_entry", lambda _, name: self.told.put(name))
        engine.watchers.append(self.coherence.watch)

    async def known(self, name: bytes) -> File:
        """A file that the kernel has looked up."""
        node = await self.tree.lookup(self.tree.inodes.root, name)
        assert isinstance(node, File)
        node.lookups += 1
        return node

    async def next(self) -> bytes:
        """What the kernel is told next."""
        return await trio.to_thread.run_sync(self.told.get, True, 10)

    async def close(self, nursery) -> None:
        """Stop; the kernel is told nothing more."""
        nursery.cancel_scope.cancel()
        self.coherence.stop()
        assert self.told.empty()
        self.tree.inodes.check()
        await self.engine.close_session(self.session)


async def test_a_value_that_a_listing_found_gone_first(tmp_path, monkeypatch):
    async with running(config(tmp_path)) as engine, trio.open_nursery() as nursery:
        face = Face(engine, monkeypatch)
        await put(engine, face.session, "value", b"v" * 5000)
        await face.known(b"value")
        await engine.evict(0, "", 0)
        assert (
            await face.tree.lookup(face.tree.inodes.root, b"value") is None
        )  # for readdir, which says nothing
        nursery.start_soon(face.coherence.run)
        assert await face.next() == b"value"
        await face.close(nursery)


async def test_a_file_that_could_not_be_stored(tmp_path, monkeypatch):
    async with running(config(tmp_path)) as engine, trio.open_nursery() as nursery:
        face = Face(engine, monkeypatch)
        nursery.start_soon(face.coherence.run)
        await put(engine, face.session, "file", b"v" * 5000)
        node = await face.known(b"file")
        handle = await face.contents.open(node, writable=True, truncate=True)
        await face.contents.write(handle, 0, b"w" * 6000)

        async def broken(*args: object, **options: object) -> None:
            raise BackingError("injected")

        monkeypatch.setattr(engine, "commit_file", broken)
        with pytest.raises(BackingError):
            await face.contents.sync(node)
        assert await face.next() == b"file"
        await face.contents.release(handle)
        await face.close(nursery)
