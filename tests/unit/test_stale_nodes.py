"""Files that lost their names behind the kernel's back, with a store that runs and a kernel that isn't there."""

import errno
import queue
from types import SimpleNamespace

import pyfuse3
import pytest
import trio
import trio.testing

from kvcsfs.engine import upkeep
from kvcsfs.engine.engine import Engine
from kvcsfs.errors import BackingError
from kvcsfs.fuse import tree
from kvcsfs.fuse.coherence import Coherence
from kvcsfs.fuse.contents import Contents
from kvcsfs.fuse.inodes import File, Inodes
from kvcsfs.fuse.operations import Operations
from kvcsfs.fuse.tree import Tree
from tests.stores import config, get, put, running, unreadable


class Face:
    """The mount of an engine without a mount: `told` has the names that the kernel must forget."""

    def __init__(self, engine, monkeypatch) -> None:
        self.engine, self.session = engine, engine.session(0)
        self.tree = Tree(engine, Inodes())
        self.contents = Contents(engine, self.tree.inodes, self.tree.namespace, self.tree.peek)
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


async def test_a_file_that_the_kernel_forgets_before_we_look_after_it(tmp_path, monkeypatch):
    """Nothing is left to be done, and the mount doesn't end with it."""
    async with running(config(tmp_path)) as engine, trio.open_nursery() as nursery:
        face = Face(engine, monkeypatch)
        await put(engine, face.session, "value", b"v" * 5000)
        node = await face.known(b"value")
        await engine.evict(0, "", 0)
        face.tree.inodes.forget([(node.number, 1)])
        assert face.tree.inodes.get(node.number) is None
        nursery.start_soon(face.coherence.run)
        await trio.testing.wait_all_tasks_blocked()
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


@pytest.mark.parametrize("how", ["replaced", "evicted"])
async def test_a_lookup_beside_whoever_waits_for_the_file(tmp_path, monkeypatch, how):
    """Else `open` of an evicted file said ESTALE twice, and the kernel asks but twice."""
    async with running(config(tmp_path)) as engine, trio.open_nursery() as nursery:
        face = Face(engine, monkeypatch)
        nursery.start_soon(face.coherence.run)
        await put(engine, face.session, "value", b"v" * 5000)
        node = await face.known(b"value")
        async with node.lock:
            if how == "replaced":
                await put(engine, face.session, "value", b"w" * 6000)
            else:
                await engine.evict(0, "", 0)
            await trio.testing.wait_all_tasks_blocked()  # coherence waits for the lock
        assert node.lock.locked()  # it has it now, and wasn't there yet
        found = await face.tree.lookup(face.tree.inodes.root, b"value")
        assert found is not node
        assert (found is not None and found.size == 6000) == (how == "replaced")
        assert await face.next() == b"value"
        await face.close(nursery)


async def test_a_lookup_beside_a_disk_that_hangs(tmp_path, monkeypatch):
    """The kernel asks nothing else of the directory meanwhile: a lookup must end."""
    monkeypatch.setattr(tree, "PATIENCE_SECONDS", 0.01)
    async with running(config(tmp_path)) as engine, trio.open_nursery() as nursery:
        face = Face(engine, monkeypatch)
        await put(engine, face.session, "value", b"v" * 5000)
        node, disk = await face.known(b"value"), trio.Event()

        async def hang() -> None:
            async with node.lock:
                await disk.wait()

        nursery.start_soon(hang)
        await trio.testing.wait_all_tasks_blocked()
        await engine.evict(0, "", 0)
        with trio.fail_after(10):
            assert await face.tree.lookup(face.tree.inodes.root, b"value") is node
        disk.set()
        await trio.testing.wait_all_tasks_blocked()
        assert await face.tree.lookup(face.tree.inodes.root, b"value") is None
        nursery.start_soon(face.coherence.run)
        assert await face.next() == b"value"
        await face.close(nursery)


async def test_a_rename_of_a_file_that_is_replaced_meanwhile(tmp_path, monkeypatch):
    """The kernel is made to look the path up again; the value stays where it is."""
    async with running(config(tmp_path)) as engine, trio.open_nursery() as nursery:
        face = Face(engine, monkeypatch)
        nursery.start_soon(face.coherence.run)
        for name in ("new", "old"):
            await put(engine, face.session, name, b"v" * 5000)
        node, target = await face.known(b"old"), await face.known(b"new")
        failed: list[int] = []

        async def rename() -> None:
            root = face.tree.inodes.root.number
            try:
                await face.operations.rename(root, b"old", root, b"new", 0, None)
            except pyfuse3.FUSEError as exc:
                failed.append(exc.errno)

        async with target.lock:
            nursery.start_soon(rename)
            await trio.testing.wait_all_tasks_blocked()
            await put(engine, face.session, "old", b"w" * 6000)
            face.tree.inodes.lose(node, {})
        await trio.testing.wait_all_tasks_blocked()
        assert failed == [errno.ESTALE]
        assert await get(engine, face.session, "old") == b"w" * 6000
        assert await get(engine, face.session, "new") == b"v" * 5000
        assert await face.next() == b"old"
        await face.close(nursery)


async def test_a_mountpoint_whose_directory_goes_and_comes_back(tmp_path, monkeypatch, expected_warnings):
    """The kernel is told of all that it knows there; what has no byte yet holds nothing, and is lost."""
    expected_warnings.append("in trouble: the backing directory was unmounted or replaced")
    expected_warnings.append(
        "'(begun|closed)' was not stored: the backing directory was unmounted or replaced"
    )
    monkeypatch.setattr(upkeep, "LOOK_SECONDS", 0.01)
    data, away = tmp_path / "data0", tmp_path / "away"
    async with running(config(tmp_path)) as engine, trio.open_nursery() as nursery:
        face = Face(engine, monkeypatch)
        nursery.start_soon(face.coherence.run)
        await put(engine, face.session, "d/value", b"v" * 5000)
        root = face.tree.inodes.root
        directory = await face.tree.lookup(root, b"d")
        directory.lookups += 1
        value = await face.tree.lookup(directory, b"value")
        value.lookups += 1
        face.tree.namespace(0).make("d/", {"mode": 0o700})
        handles = []
        for name in ("begun", "closed", "removed"):
            face.tree.namespace(0).create(name, {})
            node = await face.known(name.encode())
            handles.append(await face.contents.open(node, writable=True, truncate=True))
        await engine.volumes[0].upkeep.checkpoint()
        data.rename(away)
        with trio.fail_after(10):
            while not engine.volumes[0].store.given_up:
                await trio.sleep(0.01)
        assert {await face.next(), await face.next()} == {b"d", b"value"}
        assert value.gone
        assert await face.tree.lookup(root, b"d") is None
        with pytest.raises(BackingError):
            face.tree.namespace(0)
        begun, closed, removed = handles
        with pytest.raises(BackingError):
            await face.contents.write(begun, 0, b"x")
        await face.contents.release(closed)
        assert await face.next() == b"closed"
        async with removed.node.lock:
            with pytest.raises(BackingError):
                await face.contents.remove(removed.node)
        await face.contents.release(removed)
        away.rename(data)
        await engine.volumes.recovered()
        with trio.fail_after(10):
            while engine.status()["mountpoints"][0]["state"] != "ready":
                await trio.sleep(0.01)
        directory = await face.tree.lookup(root, b"d")
        assert face.tree.recorded(directory) == {"mode": 0o700}
        again = await face.tree.lookup(directory, b"value")
        assert again is not value and not again.gone
        await face.contents.write(begun, 0, b"x" * 5000)
        await face.contents.release(begun)
        assert await get(engine, face.session, "begun") == b"x" * 5000
        face.tree.check()
        await face.close(nursery)


async def test_a_mount_that_ends_while_a_directory_is_gone(tmp_path, monkeypatch, expected_warnings):
    expected_warnings.append("in trouble: the backing directory was unmounted or replaced")
    monkeypatch.setattr(upkeep, "LOOK_SECONDS", 0.01)
    async with running(config(tmp_path)) as engine, trio.open_nursery() as nursery:
        face = Face(engine, monkeypatch)
        nursery.start_soon(face.coherence.run)
        face.tree.namespace(0).create("begun", {})
        await face.contents.open(await face.known(b"begun"), writable=True, truncate=True)
        (tmp_path / "data0").rename(tmp_path / "away")
        with trio.fail_after(10):
            while not engine.volumes[0].store.given_up:
                await trio.sleep(0.01)
        await face.contents.close()
        await face.close(nursery)


async def test_one_directory_that_can_not_be_read_keeps_the_kernel_from_no_news(
    tmp_path, monkeypatch, expected_warnings
):
    expected_warnings.append("data1: can't be read, trying again: Input/output error")
    unreadable(monkeypatch, "data1")
    engine = Engine(config(tmp_path, mountpoints=2, backend="pooled"))
    async with engine.running(), trio.open_nursery() as nursery:
        face = Face(engine, monkeypatch)
        nursery.start_soon(face.coherence.run)
        while engine.volumes[0].recovering:
            await trio.sleep(0.001)
        await put(engine, face.session, "value", b"v" * 5000)
        await face.known(b"value")
        await put(engine, face.session, "value", b"w" * 5000)
        with trio.fail_after(10):
            assert await face.next() == b"value"
        await face.close(nursery)
