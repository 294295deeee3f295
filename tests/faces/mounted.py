"""A store with a mount in a process of its own, and a pipe to do to its engine what an SDK client would.

In the test's own process every file call would wait for a loop that waits for the test. Run as a script it serves:
requests are JSON lines on stdin, each answered by one on stdout; end of stdin stops it.
"""

import collections
import functools
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

import trio
import xxhash

from kvcsfs.config import Config, MountpointConfig, Permissions, Place
from kvcsfs.daemon import first_of
from kvcsfs.engine.engine import Engine
from kvcsfs.engine.session import Staged
from kvcsfs.errors import ConfigError
from kvcsfs.fuse.mount import Mount
from kvcsfs.fuse.operations import Operations

ROOT = Path(__file__).resolve().parents[2]


class Mounted:
    """The test's end: `put`, `get` ... act on the engine, `path` is the mount."""

    def __init__(
        self,
        data: Path,
        path: Path,
        capacity: int = 64 << 20,
        mountpoints: int = 1,
        **options: Any,  # fields of Config, lists of tables as in the file
    ) -> None:
        self.path = path
        self._arguments = [sys.executable, __file__, str(data), str(path), str(capacity), str(mountpoints)]
        self._arguments.append(json.dumps(options))
        self.start()

    def start(self) -> None:
        """Start the process, and wait until the mount answers."""
        self.process = subprocess.Popen(
            self._arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line != "ready\n":
            raise RuntimeError(f"no mount: {self.process.communicate()[1]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """See that nothing is left, also after a test that failed."""
        if self.process.poll() is None:
            self.kill()
            subprocess.run(["umount", "-l", self.path], check=True)

    def call(self, name: str, **arguments: Any) -> Any:
        """One request to the engine."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"call": name, **arguments}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def put(self, key: str, value: bytes, index: int = 0) -> None:
        """Store a value as a client does."""
        assert self.call("put", key=key, value=value.decode("latin-1"), index=index) is None

    def get(self, key: str, index: int = 0) -> bytes | None:
        """What a client reads."""
        found = self.call("get", key=key, index=index)
        return None if found is None else found.encode("latin-1")

    def delete(self, key: str) -> None:
        """Delete a value as a client does."""
        self.call("delete", key=key)

    def evict(self, prefix: str = "") -> None:
        """Evict everything below a prefix."""
        self.call("evict", prefix=prefix)

    def requests(self) -> dict[str, int]:
        """How many requests of which kind the kernel has sent since the last call, once every file is released.

        A release comes after close() has returned.
        """
        found = self.call("requests")
        assert isinstance(found, dict)
        return found

    def stop(self) -> str:
        """Stop as SIGTERM does, and return what was logged at WARNING or above."""
        _, log = self.process.communicate(timeout=20)
        assert self.process.returncode == 0, log
        return log

    def kill(self) -> None:
        """End it as kill -9 does."""
        self.process.kill()
        self.process.communicate()


def eventually(condition: Callable[[], bool]) -> None:
    """Invalidation and release are asynchronous, and ours to wait for; nothing tells when the kernel has done it."""
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("never came true")


counts: collections.Counter[str] = collections.Counter()
held = {"files": 0}  # open handles


def counted(name: str, handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A handler that counts its requests; what was asked of an unknown attribute, by its name."""

    @functools.wraps(handler)
    async def call(*args: Any) -> Any:
        counts[f"{name} {args[2].decode()}" if name == "getxattr" else name] += 1
        result = await handler(*args)
        held["files"] += {"open": 1, "create": 1, "release": -1}.get(name, 0)
        return result

    return call


def count_requests() -> None:
    """Count every request of the kernel, those that aren't answered too."""
    for name in dir(Operations):
        handler = getattr(Operations, name)
        if not name.startswith("_") and callable(handler) and name not in ("init", "stacktrace"):
            setattr(Operations, name, counted(name, handler))


class Loop(trio.abc.Instrument):
    """Counts the turns of trio's loop."""

    turns = 0

    def after_io_wait(self, timeout: float) -> None:
        self.turns += 1


class Server:
    """The other end: an engine, a mount, and what requests do to them."""

    def __init__(self, data: Path, path: Path, capacity: int, count: int, options: dict[str, Any]) -> None:
        folders = [data / str(i) for i in range(count)]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        backend = "pooled" if count > 1 else "direct"
        permissions = tuple(Permissions(**given) for given in options.pop("permissions", []))
        places = tuple(Place(Path(given.pop("path")), **given) for given in options.pop("places", []))
        mountpoints = tuple(MountpointConfig(f, capacity) for f in folders)
        self.engine = Engine(
            Config(mountpoints, backend=backend, permissions=permissions, places=places, **options)
        )
        self.session = self.engine.session(0)
        self.mount = Mount(self.engine, path)
        self.loop = Loop()

    async def serve(self) -> None:
        """Answer until stdin ends."""
        async with self.engine.running(), trio.open_nursery() as nursery:
            await self.engine.volumes.recovered()
            await self.mount.start(nursery)
            print("ready", flush=True)
            while line := await trio.to_thread.run_sync(sys.stdin.readline):
                request = json.loads(line)
                print(json.dumps(await getattr(self, request.pop("call"))(**request)), flush=True)
            await self.mount.stop()

    async def put(self, key: str, value: str, index: int) -> None:
        raw = value.encode("latin-1")
        (staged,) = await self.engine.reserve_many(self.session, index, [key], [len(raw)])
        assert isinstance(staged, Staged), staged
        os.pwrite(staged.fd, raw, 0)
        os.close(staged.fd)
        checksum = xxhash.xxh3_128_digest(raw)
        (failed,) = await self.engine.commit_many(self.session, [staged.token], [checksum])
        assert failed is None, failed

    async def get(self, key: str, index: int) -> str | None:
        opened = await self.engine.open_many(self.session, index, [key])
        (entry,) = opened.entries
        if entry is None:
            return None
        value = os.pread(opened.fds[0], entry.size, 0)
        self.engine.release(self.session, opened.lease)
        assert xxhash.xxh3_128_digest(value) == entry.checksum
        return value.decode("latin-1")

    async def delete(self, key: str) -> None:
        await self.engine.delete_many(0, [key])

    async def evict(self, prefix: str) -> tuple[int, int]:
        return await self.engine.evict(0, prefix, 0)

    async def requests(self) -> dict[str, int]:
        while held["files"]:
            await trio.sleep(0.001)
        found = dict(counts)
        counts.clear()
        found.pop("forget", None)  # it comes when the kernel likes
        return found

    async def turns(self) -> int:
        """How often the loop has looked for what to do, since it was first asked."""
        if not self.loop.turns:
            trio.lowlevel.add_instrument(self.loop)
        return self.loop.turns

    async def status(self) -> dict[str, Any]:
        return self.engine.status()

    async def check(self) -> None:
        self.engine.check()
        self.mount.check()

    async def fail(self, method: str) -> None:
        """The next call of an engine method raises what no handler expects."""
        real = getattr(self.engine, method)

        async def broken(*args: object, **kwargs: object) -> None:
            setattr(self.engine, method, real)
            raise ZeroDivisionError("injected")

        setattr(self.engine, method, broken)


def main() -> None:
    """Serve; a failure to start is one line."""
    data, path, capacity, count, options = sys.argv[1:]
    count_requests()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    try:
        trio.run(Server(Path(data), Path(path), int(capacity), int(count), json.loads(options)).serve)
    except BaseExceptionGroup as group:
        refused, _ = group.split(ConfigError)
        if refused is None:
            raise
        sys.exit(str(first_of(refused)))


if __name__ == "__main__":
    main()
