"""Files that lost their names behind the kernel's back, with a store that runs and a kernel that isn't there."""

import errno
import queue
from types import SimpleNamespace

import pytest

pytest.importorskip("pyfuse3", exc_type=ImportError)

import pyfuse3
import trio
import trio.testing

from kvcsfs.errors import BackingError
from kvcsfs.fuse.coherence import Coherence
from kvcsfs.fuse.contents import Contents
from kvcsfs.fuse.inodes import File, Inodes
from kvcsfs.fuse.operations import Operations
from kvcsfs.fuse.tree import Tree
from tests.stores import config, get, put, running


class Face:
    """The mount of an engine without a mount: `told` has the names that the kernel must forget."""

    def __init__(self, engine, monkeypatch) -> None:
        self.engine, self.session = engine, engine.session(0)
        self.tree = Tree(engine, Inodes())
        self.contents = Contents(engine, self.tree.inodes, self.tree.namespace)
        self.operations = Operations(self.tree, self.contents)
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

    async def is_stale_for(self, node: File, what: str, value: int) -> None:
        """Setting an attribute makes the kernel look the path up again."""
        names = ("size", "mode", "uid", "gid", "atime", "mtime")
        fields = SimpleNamespace(**{f"update_{name}": name == what for name in names})
        attributes = SimpleNamespace(**{f"st_{what}": value})
        with pytest.raises(pyfuse3.FUSEError) as failed:
            await self.operations.setattr(node.number, attributes, fields, None, None)
        assert failed.value.errno == errno.ESTALE

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
        # For readdir, which tells the kernel nothing of it.
        assert await face.tree.lookup(face.tree.inodes.root, b"value") is None
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


async def test_a_file_that_the_kernel_forgets_while_we_wait_for_its_lock(tmp_path, monkeypatch):
    async with running(config(tmp_path)) as engine, trio.open_nursery() as nursery:
        face = Face(engine, monkeypatch)
        nursery.start_soon(face.coherence.run)
        await put(engine, face.session, "value", b"v" * 5000)
        node = await face.known(b"value")
        async with node.lock:
            await put(engine, face.session, "value", b"w" * 6000)
            await trio.testing.wait_all_tasks_blocked()
            face.tree.inodes.forget([(node.number, 1)])
        await trio.testing.wait_all_tasks_blocked()
        assert face.tree.inodes.get(node.number) is None
        await face.close(nursery)


@pytest.mark.parametrize("behind", [False, True])
async def test_a_file_keeps_its_mode_when_the_kernel_forgets_it(tmp_path, monkeypatch, behind):
    async with running(config(tmp_path)) as engine, trio.open_nursery() as nursery:
        face = Face(engine, monkeypatch)
        nursery.start_soon(face.coherence.run)
        for name in ("busy", "value"):
            await put(engine, face.session, name, b"v" * 5000)
        busy, node = await face.known(b"busy"), await face.known(b"value")
        async with busy.lock:
            if behind:  # the task waits for another file's lock meanwhile
                await put(engine, face.session, "busy", b"w" * 5000)
            await trio.testing.wait_all_tasks_blocked()
            handle = await face.contents.open(node, writable=True, truncate=True)
            await face.contents.write(handle, 0, b"w" * 6000)
            face.tree.namespace(0).set_file("value", {"mode": 0o600})
            await face.contents.release(handle)
            face.tree.inodes.forget([(node.number, 1)])
        await trio.testing.wait_all_tasks_blocked()
        assert face.tree.inodes.get(node.number) is None
        assert face.tree.namespace(0).attributes("value") == {"mode": 0o600}
        await put(engine, face.session, "value", b"x" * 5000)
        await trio.testing.wait_all_tasks_blocked()
        assert face.tree.namespace(0).attributes("value") == {}
        if behind:
            assert await face.next() == b"busy"
        await face.close(nursery)


@pytest.mark.parametrize("how", ["replaced", "evicted"])
@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("read", [False, True])
async def test_changes_by_a_path_of_which_the_kernel_has_not_heard(tmp_path, monkeypatch, how, looked, read):
    async with running(config(tmp_path)) as engine, trio.open_nursery() as nursery:
        face = Face(engine, monkeypatch)
        await put(engine, face.session, "value", b"v" * 5000)
        node = await face.known(b"value")
        handle = await face.contents.open(node, writable=False, truncate=False) if read else None
        if how == "replaced":
            await put(engine, face.session, "value", b"w" * 6000)
        else:
            await engine.delete_many(0, ["value"])
        if looked:
            await face.tree.lookup(face.tree.inodes.root, b"value")
        await face.is_stale_for(node, "size", 0)
        await face.is_stale_for(node, "size", 100)
        if handle is None:
            await face.is_stale_for(node, "mode", 0o600)
        else:
            assert bytes(await face.contents.read(node, 0, 10)) == b"v" * 10
            await face.contents.release(handle)
        assert await get(engine, face.session, "value") == (b"w" * 6000 if how == "replaced" else None)
        await face.close(nursery)
