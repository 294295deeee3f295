"""What the store does, the same through each of its doors: the engine, the socket, the mount."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
import trio

from kvcsfs import wire
from kvcsfs.engine.engine import Engine
from tests import stores
from tests.faces.test_cli import Daemon
from tests.needs import needs_fuse
from tests.rawclient import RawClient

CAPACITY = 8 << 20  # that of the daemons of test_cli


class Door(Protocol):
    """One way in. Statuses are 0 or -errno."""

    def put(self, key: str, value: bytes) -> int: ...

    def get(self, key: str) -> bytes | None: ...

    def delete(self, key: str) -> int: ...

    def keys(self, prefix: str) -> list[str]: ...

    def reading(self, key: str) -> AbstractContextManager[Callable[[], bytes]]:
        """Hold a value open; the function reads it."""
        ...

    def restart(self) -> None:
        """Stop cleanly and start again on the same data."""
        ...

    def close(self) -> None: ...


class EngineDoor:
    """The engine in a thread with a loop of its own."""

    def __init__(self, path: Path) -> None:
        self._settings = stores.config(path, CAPACITY)
        self._start()

    def _start(self) -> None:
        self._engine = Engine(self._settings)  # here, as only the main thread may set a signal's handler
        ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main, ready))
        self._thread.start()
        assert ready.wait(10)

    async def _main(self, ready: threading.Event) -> None:
        self._token, self._stop = trio.lowlevel.current_trio_token(), trio.Event()
        async with self._engine.running():
            await self._engine.volumes.recovered()
            self._session = self._engine.session(0)
            ready.set()
            await self._stop.wait()
            self._engine.check()

    def _run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return trio.from_thread.run(call, *arguments, trio_token=self._token)

    def put(self, key: str, value: bytes) -> int:
        failed = self._run(stores.put, self._engine, self._session, key, value)
        return -failed.errno if failed else 0

    def get(self, key: str) -> bytes | None:
        found: bytes | None = self._run(stores.get, self._engine, self._session, key)
        return found

    def delete(self, key: str) -> int:
        (failed,) = self._run(self._engine.delete_many, 0, [key])
        return -failed.errno if failed else 0

    def keys(self, prefix: str) -> list[str]:
        return [e.key for e in self._run(self._engine.page, 0, prefix, "", 1000)]

    @contextmanager
    def reading(self, key: str) -> Iterator[Callable[[], bytes]]:
        opened = self._run(self._engine.open_many, self._session, 0, [key])
        yield lambda: os.pread(opened.fds[0], opened.entries[0].size, 0)
        trio.from_thread.run_sync(self._engine.release, self._session, opened.lease, trio_token=self._token)

    def restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        trio.from_thread.run_sync(self._stop.set, trio_token=self._token)
        self._thread.join()


class _DaemonDoor:
    """A daemon in a process of its own."""

    flags: tuple[str, ...] = ()

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start()

    def _start(self) -> None:
        self._daemon = Daemon(self._path, *self.flags)
        self._client: RawClient = self._daemon.client()

    def restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        self._client.close()
        status, log = self._daemon.stop()
        assert (status, "Traceback" in log) == (0, False), log


class SocketDoor(_DaemonDoor):
    def put(self, key: str, value: bytes) -> int:
        return self._client.put(key, value)

    def get(self, key: str) -> bytes | None:
        return self._client.get(key)

    def delete(self, key: str) -> int:
        return self._client.ask(wire.Delete(2, 0, [key]), wire.DeleteReply).statuses[0]

    def keys(self, prefix: str) -> list[str]:
        return [e.key for e in self._client.ask(wire.List(2, 0, prefix), wire.ListReply).entries]

    @contextmanager
    def reading(self, key: str) -> Iterator[Callable[[], bytes]]:
        (reply,), (fds,) = self._client.open([key])
        yield lambda: os.pread(fds[0], reply.sizes[0], 0)
        os.close(fds[0])
        self._client.send(wire.Release(0, reply.lease))


class MountDoor(_DaemonDoor):
    def __init__(self, path: Path) -> None:
        self._mount = path / "mnt"
        self._mount.mkdir()
        self.flags = ("--mount", str(self._mount))
        super().__init__(path)

    def put(self, key: str, value: bytes) -> int:
        path = self._mount / key
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            temporary.write_bytes(value)
            temporary.rename(path)
        except OSError as exc:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
            return -(exc.errno or errno.EIO)
        return 0

    def get(self, key: str) -> bytes | None:
        try:
            return (self._mount / key).read_bytes()
        except FileNotFoundError:
            return None

    def delete(self, key: str) -> int:
        try:
            (self._mount / key).unlink()
        except OSError as exc:
            return -(exc.errno or errno.EIO)
        return 0

    def keys(self, prefix: str) -> list[str]:
        names = [str(p.relative_to(self._mount)) for p in self._mount.rglob("*") if p.is_file()]
        return sorted(n for n in names if n.startswith(prefix))

    @contextmanager
    def reading(self, key: str) -> Iterator[Callable[[], bytes]]:
        with open(self._mount / key, "rb", buffering=0) as file:
            yield lambda: os.pread(file.fileno(), 1 << 20, 0)


@pytest.fixture(
    params=[EngineDoor, SocketDoor, pytest.param(MountDoor, marks=[pytest.mark.mount, needs_fuse])]
)
def door(request, tmp_path) -> Iterator[Door]:
    opened: Door = request.param(tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 1 << 20])
def test_a_value_comes_back_whole(door, size):
    value = os.urandom(size)
    assert door.get("m/k") is None
    assert door.put("m/k", value) == 0
    assert door.get("m/k") == value


def test_the_last_value_of_a_key_is_its_value(door):
    for i in range(4):
        assert door.put("k", bytes([i]) * (9000 - 2000 * i)) == 0
    assert door.get("k") == b"\3" * 3000


def test_deleting(door):
    assert door.put("k", b"x") == 0
    assert door.delete("k") == 0
    assert door.get("k") is None
    assert door.delete("k") == -errno.ENOENT


@pytest.mark.parametrize("how", ["replaced", "deleted", "evicted"])
def test_what_is_open_stays_as_it_was(door, how):
    old = os.urandom(200_000)
    door.put("k", old)
    with door.reading("k") as read:
        if how == "replaced":
            door.put("k", b"new")
        elif how == "deleted":
            door.delete("k")
        for i in range(2 * CAPACITY // 200_000):
            assert door.put(f"other/{i}", b"o" * 200_000) == 0
        assert read() == old


def test_keys_are_listed_by_prefix_and_in_order(door):
    for key in ("b", "a/2", "a/1/x", "a/10"):
        assert door.put(key, b"x") == 0
    assert door.keys("") == ["a/1/x", "a/10", "a/2", "b"]
    assert door.keys("a/") == ["a/1/x", "a/10", "a/2"]


def test_the_oldest_leave_when_the_store_is_full(door):
    value = b"v" * 500_000
    names = [f"m/{i:02}" for i in range(3 * CAPACITY // len(value))]
    for name in names:
        assert door.put(name, value) == 0
    left = door.keys("m/")
    assert left == names[-len(left) :]
    assert CAPACITY * 3 // 4 < len(left) * len(value) < CAPACITY


def test_a_value_larger_than_the_store_is_refused_and_costs_nothing(door):
    door.put("kept", b"x" * 100)
    assert door.put("big", bytes(CAPACITY)) == -errno.ENOSPC
    assert door.get("big") is None
    deadline = time.monotonic() + 10
    while status := door.put("after", b"y"):  # the mount hears of a close() only after it returned
        assert status == -errno.ENOSPC
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert door.get("after") == b"y"


def test_a_restart_keeps_everything(door):
    contents = stores.values([f"m/{i}/k" for i in range(20)])
    for key, value in contents.items():
        door.put(key, value)
    door.restart()
    assert door.keys("") == sorted(contents)
    assert {key: door.get(key) for key in contents} == contents
