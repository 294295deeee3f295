"""Real shortages: a file system that is full, no descriptors left, a directory that can't be read at the start."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from kvcsfs.config import Config, MountpointConfig
from kvcsfs.engine import recovery, volumes
from kvcsfs.engine.engine import Engine
from kvcsfs.engine.session import Staged
from kvcsfs.errors import BusyError
from tests.stores import checksum, config, get, keys, put, running, unreadable, write

pytestmark = pytest.mark.fault


@pytest.fixture
def small(tmp_path) -> Iterator[Path]:
    """A file system in memory of 4 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)], check=True)
    yield path
    subprocess.run(["umount", str(path)], check=True)


async def test_a_file_system_smaller_than_the_capacity(small):
    size = 512 << 10
    async with running(Config((MountpointConfig(small, 8 << 20),), small / "sock")) as engine:
        session = engine.session(0)
        for i in range(12):
            (staged,) = await engine.reserve_many(session, 0, [f"k{i:02}"], [size])
            assert isinstance(staged, Staged), staged
            write(staged, bytes([i]) * size)
            assert await engine.commit_many(session, [staged.token], [checksum(bytes([i]) * size)]) == [None]
        stored = [f"k{i:02}" for i in range(12)][-len(await keys(engine)) :]
        assert 5 <= len(stored) <= 7, "the older ones were evicted, long before the capacity was reached"
        assert await keys(engine) == stored
        assert await engine.verify_many(0, stored) == [size] * len(stored)
        await engine.evict(0, "", 0)
        assert await put(engine, session, "later", b"x" * size) is None, "with room again it goes on"
        await engine.delete_many(0, ["later"])


async def test_a_start_that_can_not_read_tries_again(tmp_path, monkeypatch, expected_warnings):
    expected_warnings.append("can't be read, trying again: Input/output error")
    settings = config(tmp_path)
    async with running(settings) as engine:
        await put(engine, engine.session(0), "k", b"x")
    real, failures = recovery.recover, [errno.EIO, errno.EIO]

    def failing(store, watch):
        if failures:
            raise OSError(failures.pop(), "Input/output error")
        return real(store, watch)

    monkeypatch.setattr(recovery, "recover", failing)
    monkeypatch.setattr(volumes, "RETRY_SECONDS", 0.01)
    async with running(settings) as engine:
        assert failures == []
        assert await get(engine, engine.session(0), "k") == b"x"


async def test_one_mountpoint_that_can_not_be_read_stays_alone(tmp_path, monkeypatch, expected_warnings):
    expected_warnings.append("data1: can't be read, trying again: Input/output error")
    unreadable(monkeypatch, "data1")
    engine = Engine(config(tmp_path, mountpoints=2, backend="pooled"))
    async with engine.running():
        session = engine.session(0)
        while engine.volumes[0].recovering:
            await trio.sleep(0.001)
        assert await put(engine, session, "k", b"x", 0) is None
        assert await get(engine, session, "k", 1) is None
        with pytest.raises(BusyError):
            await put(engine, session, "k", b"x", 1)
        assert [m["state"] for m in engine.status()["mountpoints"]] == ["ready", "recovering"]


async def test_a_checkpoint_that_finds_no_room_is_told_and_tried_again(
    tmp_path, monkeypatch, expected_warnings
):
    expected_warnings.append("no checkpoint: No space left on device")
    real, failures, done = recovery.SnapshotWriter.finish, [1, 2], trio.Event()

    def full(*args: Any) -> None:
        if failures:
            failures.pop()
            raise OSError(errno.ENOSPC, "No space left on device")
        assert not (tmp_path / "data0" / "snapshot").exists()
        real(*args)
        trio.from_thread.run_sync(done.set)

    monkeypatch.setattr(recovery.SnapshotWriter, "finish", full)
    monkeypatch.setattr(volumes, "CHECKPOINT_SECONDS", 0.01)
    async with running(config(tmp_path)) as engine:
        with trio.fail_after(10):
            await done.wait()
        assert (tmp_path / "data0" / "snapshot").exists()
        monkeypatch.setattr(recovery.SnapshotWriter, "finish", real)
        assert await put(engine, engine.session(0), "k", b"x") is None


STARVED = """
import os, sys, trio
from pathlib import Path
sys.path.insert(0, {root!r})
from kvcsfs.engine.session import Staged
from kvcsfs.errors import BackingError
from tests import stores

async def main():
    async with stores.running(stores.config(Path({data!r}), 64 << 20)) as engine:
        session, other = engine.session(0), engine.session(1)
        contents = stores.values([f"k{{i}}" for i in range(320)], 600)
        for key, value in contents.items():
            assert await stores.put(engine, session, key, value) is None
        opened = await engine.open_many(other, 0, list(contents))
        assert opened.errors and all(isinstance(e, BackingError) for e in opened.errors.values())
        hits = [e for e in opened.entries if e]
        assert hits and len(opened.errors) + len(hits) == 320
        for entry, fd in zip(hits, opened.fds):
            assert os.pread(fd, entry.size, 0) == contents[entry.key]
        results = await engine.reserve_many(session, 0, ["n1", "n2"], [600, 600])
        for r in results:
            if isinstance(r, Staged):
                os.close(r.fd)
            else:
                assert isinstance(r, BackingError), r
        engine.release(other, opened.lease)
        await engine.delete_many(0, list(contents)[:290])
        got = [await stores.get(engine, engine.session(2), key) for key in list(contents)[290:]]
        assert got == list(contents.values())[290:], "with descriptors again, everything is readable"
        await engine.close_session(session)
        engine.check()
        assert engine.volumes[0].catalog.ledger.used == stores.bytes_on_disk(Path({data!r}) / "data0")
    print("done")

trio.run(main)
"""


def test_no_descriptors_left(tmp_path):
    script = STARVED.format(root=str(Path(__file__).parents[2]), data=str(tmp_path))
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300)),
    )
    assert result.stdout == "done\n", result.stderr
