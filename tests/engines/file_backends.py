"""What an engine's own file backend must get from a directory on the mount of a real daemon: scenarios for all."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

from kvcs import KvcsLowLevelClient, LLPutItem
from tests.engines.daemon import Daemon
from tests.needs import needs_fuse

ON_THE_MOUNT = [
    pytest.mark.engines,
    pytest.mark.mount,
    needs_fuse,
]
PATIENCE_S = 30.0
T = TypeVar("T")


class FileBackend(Protocol):
    """An engine's own file backend, driven as the engine does. Its values have numbers, and are all of one size."""

    def value(self, number: int) -> bytes:
        """What is stored under a number."""

    def put(self, number: int) -> bool:
        """Store. False: the backend says that it didn't."""

    def get(self, number: int) -> bytes | None:
        """Load. None: the backend says that it is a miss."""


Opening = Callable[[Path], AbstractContextManager[FileBackend]]
"""Makes a backend whose directory is the path; the path isn't there yet."""


def random_value(number: int, size: int) -> bytes:
    """Bytes that follow from a number."""
    return random.Random(number).randbytes(size)


@contextmanager
def mounted(home: Path, room: int, size: int) -> Iterator[tuple[Daemon, Path]]:
    """A daemon with room for so many values of a size, and a directory of its mount. It must log no warning."""
    with Daemon(home, room * (size + 12288), mount=home / "mnt") as daemon:
        yield daemon, home / "mnt" / "tenant" / "engine"
    assert daemon.warnings() == []


def to_the_bit(home: Path, opened: Opening, size: int) -> None:
    """What was put comes back, what wasn't or was evicted is a miss, and can be put again."""
    with mounted(home, 32, size) as (daemon, directory), opened(directory) as backend:
        numbers = range(4)
        assert [backend.get(n) for n in numbers] == [None] * 4
        for _ in range(2):
            assert all(backend.put(n) for n in numbers)
            assert [backend.get(n) for n in numbers] == [backend.value(n) for n in numbers]
            daemon.empty()
            assert [backend.get(n) for n in numbers] == [None] * 4


def evicted_all_the_time(home: Path, opened: Opening, size: int) -> None:
    """While another tenant stores, too, and everything is evicted now and then, a value is right or a miss."""
    rng, hits, misses, stored = random.Random(1), 0, 0, 0
    with mounted(home, 16, size) as (daemon, directory), opened(directory) as backend:
        with pushed_out(daemon, size) as push:
            for number in range(60):
                push()
                stored += backend.put(number)
                for asked in (number, number - rng.randrange(1, 5), number - rng.randrange(5, 12)):
                    push()
                    got = backend.get(max(asked, 0))
                    assert got in (None, backend.value(max(asked, 0)))
                    hits, misses = hits + (got is not None), misses + (got is None)
        assert backend.put(99)
        assert backend.get(99) == backend.value(99)
    assert stored > 40
    assert min(hits, misses) > 20


@contextmanager
def pushed_out(daemon: Daemon, size: int) -> Iterator[Callable[[], None]]:
    """Another tenant: a call makes it store a value, beside what the caller does next; each tenth evicts everything."""
    calls, ended, failed = threading.Semaphore(0), threading.Event(), list[str]()

    def run() -> None:
        with KvcsLowLevelClient(daemon.socket) as client:
            for i in itertools.count():
                calls.acquire()
                if ended.is_set():
                    return
                if i % 10 == 9:
                    daemon.evict()
                elif (status := client.ll_batch_put([LLPutItem(f"other/{i}", bytes(size))])[0].status) < 0:
                    failed.append(f"{i}: {status}")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield calls.release
    finally:
        ended.set()
        calls.release()
        thread.join(PATIENCE_S)
    assert not failed


def killed_and_started_again(home: Path, opened: Opening, size: int) -> None:
    """A daemon that dies in the middle of a call costs what was under way; the backend goes on with the next one."""
    rng = random.Random(2)
    with mounted(home, 64, size) as (daemon, directory), opened(directory) as backend:
        time.sleep(2)  # what directories a backend made when it started is on disk a moment later
        for turn in range(3):
            first = turn * 16
            for number in range(first, first + 8):
                assert backend.put(number)
                assert backend.get(number) == backend.value(number)
            death = threading.Timer(rng.uniform(0, 0.02), daemon.kill)
            death.start()
            for number in range(first + 8, first + 16):
                stored = unless_it_fails(backend.put, number) or False
                got = unless_it_fails(backend.get, number)
                assert got in (None, backend.value(number))
                assert stored or got is None
            death.join()
            assert unless_it_fails(backend.get, first) is None
            daemon.start()
            for number in range(first + 16):
                got = backend.get(number)
                assert got in (None, backend.value(number))
                assert got is not None or number % 16 >= 8


def unless_it_fails(call: Callable[[int], T], number: int) -> T | None:
    """A call while the daemon dies or is dead: the backend may pass on that the file system failed."""
    try:
        return call(number)
    except OSError:
        return None


SCENARIOS = [to_the_bit, evicted_all_the_time, killed_and_started_again]
