"""How many requests an operation costs: each is a trip to the daemon, and what more of them is slower.

Counts are exact where the kernel's are; they were read off a Linux 6.18.
"""

import mmap
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faces.mounted import Mounted
from tests.needs import needs_fuse

pytestmark = [
    pytest.mark.mount,
    needs_fuse,
]
MIB = 1 << 20
OPENED = {"open": 1, "flush": 1, "release": 1}


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Iterator[Mounted]:
    base = tmp_path_factory.mktemp("requests")
    with Mounted(base / "data", base / "mnt") as mounted:
        (mounted.path / "d").mkdir()
        write(mounted.path / "d" / "first", os.O_RDWR, b"here the kernel asks for security.capability, once")
        yield mounted
        mounted.call("check")
        assert mounted.stop() == ""


def cost(store: Mounted, act: Callable[[], Any]) -> dict[str, int]:
    """The requests of an act, with the releases that follow it.

    A change in a directory makes the kernel ask for its attributes once more at the next look: that is done before.
    """
    if (store.path / "d").exists():
        os.stat(store.path / "d")
    store.requests()
    act()
    return store.requests()


def read(path: Path, flags: int = 0) -> bytes:
    fd = os.open(path, os.O_RDONLY | flags)
    buffer = mmap.mmap(-1, 4 * MIB)
    size = os.readv(fd, [buffer])
    os.close(fd)
    return buffer[:size]


def write(path: Path, flags: int, *pieces: bytes) -> None:
    fd = os.open(path, flags | os.O_CREAT)
    for piece in pieces:
        os.write(fd, piece)
    os.close(fd)


def test_looking(store):
    store.put("d/looked", b"x")
    path = store.path / "d" / "looked"
    assert cost(store, lambda: os.stat(path)) == {"lookup": 1}
    assert cost(store, lambda: os.stat(path)) == {}
    assert cost(store, lambda: os.access(path, os.R_OK)) == {}
    for _ in range(2):  # what isn't there is never cached
        assert cost(store, lambda: os.path.exists(store.path / "d" / "none")) == {"lookup": 1}


def test_reading_asks_for_a_mebibyte_at_once_and_then_not_again(store):
    value = os.urandom(4 * MIB)
    for i, flags in enumerate((0, os.O_DIRECT)):
        store.put(f"d/v{i}", value)
        path = store.path / "d" / f"v{i}"
        assert cost(store, lambda p=path, f=flags: read(p, f)) == OPENED | {"lookup": 1, "read": 4}
    store.put("d/small", value[:65536])
    path = store.path / "d" / "small"
    assert read(path) == value[:65536]
    assert cost(store, lambda: read(path)) == OPENED


def test_a_map_reads_ahead_in_full_requests(store):
    store.put("d/mapped", os.urandom(4 * MIB))

    def read_mapped() -> None:
        with (
            open(store.path / "d" / "mapped", "rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as area,
        ):
            sum(area[::4096])

    found = cost(store, read_mapped)
    assert found["read"] <= 6
    assert set(found) <= {"lookup", "open", "read", "flush", "release", "getattr"}


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR])
def test_writing(store, flags):
    path = store.path / "d" / f"written{flags}"
    made = {"lookup": 1, "create": 1, "flush": 1, "release": 1}
    assert cost(store, lambda: write(path, flags, b"x" * 4096)) == made | {"write": 1}
    assert cost(store, lambda: write(path, flags | os.O_TRUNC, *[b"x" * 65536] * 8)) == OPENED | {"write": 8}
    aligned = mmap.mmap(-1, 4 * MIB)
    assert cost(store, lambda: write(path, flags | os.O_TRUNC, aligned)) == OPENED | {"write": 4}


def test_publishing_by_rename(store):
    temporary, final = store.path / "d" / ".x.tmp", store.path / "d" / "x"

    def publish() -> None:
        write(temporary, os.O_WRONLY, b"x" * 5000)
        os.rename(temporary, final)

    made = {"lookup": 2, "create": 1, "write": 1, "flush": 1, "release": 1, "rename": 1}
    assert cost(store, publish) == made | {"getattr": 1}  # of the directory that has changed
    assert cost(store, lambda: os.unlink(final)) == {"unlink": 1}


def test_directories(store):
    path = store.path / "d" / "e"
    assert cost(store, lambda: os.mkdir(path)) == {"lookup": 1, "mkdir": 1}
    assert cost(store, lambda: os.makedirs(path / "f" / "g")) == {"lookup": 3, "mkdir": 2, "getattr": 1}
    assert cost(store, lambda: os.rmdir(path / "f" / "g")) == {"rmdir": 1, "getattr": 1}


def test_a_listing_brings_the_attributes_along(store):
    for i in range(1000):
        store.put(f"l/{i:05}", b"x")
    for command in (["ls", "-l"], ["du", "-s"], ["find"]):
        found = cost(store, lambda c=command: subprocess.run([*c, store.path / "l"], check=True, stdout=-3))
        assert found.pop("readdir") <= 8
        assert set(found.items()) <= {("lookup", 1), ("opendir", 1), ("getattr", 1), ("releasedir", 1)}
    assert cost(store, lambda: os.statvfs(store.path)) == {"statfs": 1}


def test_what_extended_attributes_cost_where_they_are_answered(tmp_path):
    with Mounted(tmp_path / "data", tmp_path / "mnt", mount_xattrs=True) as store:
        asked = "getxattr security.capability"
        only_writes = cost(store, lambda: write(store.path / "v", os.O_WRONLY, *[b"x" * 65536] * 8))
        assert asked not in only_writes
        reads_too = cost(store, lambda: write(store.path / "w", os.O_RDWR, *[b"x" * 65536] * 8))
        assert reads_too[asked] == 8
        assert store.stop() == ""


def test_a_request_is_one_turn_of_the_loop(store):
    names = [store.path / "d" / f"none-{number}" for number in range(200)]
    before = store.call("turns")
    assert cost(store, lambda: [name.exists() for name in names]) == {"lookup": 200}
    assert store.call("turns") - before < 250  # the calls of this test take some
