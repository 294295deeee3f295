"""The SDK's deadlines over a real daemon whose backing file system stops answering in the middle of a transfer."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcs import KvcsLowLevelClient, KvcsTimeoutError, LLGetItemOpt, LLPutItem
from tests.daemons import Daemon, store_file
from tests.deadlines import PROMISED_SECONDS, typical_overshoot
from tests.faults.hangfs import HangFs
from tests.needs import needs_fuse

pytestmark = [
    pytest.mark.fault,
    pytest.mark.mount,
    needs_fuse,
]

DEADLINE_SECONDS = 0.3
SLACK_SECONDS = (
    0.2  # the contract says 0.05; the rest is for a machine that runs other tests at the same time
)
KEYS = [f"m/{i}" for i in range(4)]
SIZE = 3 << 20


@pytest.fixture
def backing(tmp_path: Path) -> Iterator[HangFs]:
    with HangFs(tmp_path / "data") as served:
        yield served


@pytest.fixture
def client(tmp_path: Path, backing: HangFs) -> Iterator[KvcsLowLevelClient]:
    with (
        Daemon(store_file(tmp_path, backing.path, capacity="1GiB")),
        KvcsLowLevelClient(tmp_path / "sock") as made,
    ):
        items = [LLPutItem(key, key.encode() * (SIZE // len(key))) for key in KEYS]
        assert [r.status for r in made.ll_batch_put(items)] == [0] * len(KEYS)
        yield made
        backing.go()


def read(client: KvcsLowLevelClient, buffers: list[bytearray], seconds: float) -> list[int]:
    items = [LLGetItemOpt(key) for key in KEYS]
    return [r.status for r in client.ll_batch_get_into_items(items, buffers, seconds)]


def open_files(backing: HangFs) -> list[int]:
    """Descriptors of every object file, for the caller to close."""
    return [os.open(path, os.O_RDONLY) for path in (backing.path / "slots").glob("*/*")]


def test_a_get_returns_in_time_and_its_memory_is_left_alone(client, backing):
    buffers = [bytearray(SIZE) for _ in KEYS]
    sizes = read(client, buffers, 30)
    assert sizes == [len(key) * (SIZE // len(key)) for key in KEYS]
    files = open_files(backing)  # the daemon has descriptors ready: it is the client that will hang
    backing.hang()
    for fd in files:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    begin = time.monotonic()
    with pytest.raises(KvcsTimeoutError):
        read(client, buffers, DEADLINE_SECONDS)
    assert time.monotonic() - begin < DEADLINE_SECONDS + SLACK_SECONDS
    assert typical_overshoot(lambda seconds: read(client, buffers, seconds)) < PROMISED_SECONDS
    for buffer in buffers:
        buffer[:] = b"\xaa" * SIZE
    backing.go()
    for fd in files:
        os.close(fd)
    others = [bytearray(SIZE) for _ in KEYS]
    assert read(client, others, 30) == sizes, "it goes on when the file system does"
    left = [buffer.count(0xAA) for buffer in buffers]
    assert left == [SIZE] * len(KEYS), "a worker came late to the caller's memory"


def test_a_put_returns_in_time(client, backing):
    value = bytes(SIZE)
    items = [LLPutItem(f"large/{i}", value) for i in range(64)]  # takes longer than the file system answers
    hanging = threading.Timer(0.05, backing.hang)
    hanging.start()
    begin = time.monotonic()
    results = client.ll_batch_put(items, DEADLINE_SECONDS)
    assert time.monotonic() - begin < DEADLINE_SECONDS + SLACK_SECONDS
    hanging.join()
    assert [r.status for r in results] == [-errno.ETIMEDOUT] * len(items)
    backing.go()
    again = [LLPutItem(key, b"after") for key in KEYS]
    assert [r.status for r in client.ll_batch_put(again, 30)] == [0] * len(KEYS)
    assert {r.status for r in client.ll_batch_query([item.key for item in items])} == {"not_found"}


def test_a_call_that_needs_the_hung_daemon_returns_in_time(client, backing):
    backing.hang()
    for call in (
        lambda: client.ll_batch_put([LLPutItem("new", b"value")], DEADLINE_SECONDS),
        lambda: client.ll_batch_delete(KEYS, DEADLINE_SECONDS),
    ):
        begin = time.monotonic()
        assert {int(getattr(r, "status", r)) for r in call()} <= {-errno.ETIMEDOUT, -errno.EIO}
        assert time.monotonic() - begin < DEADLINE_SECONDS + SLACK_SECONDS
    item = LLPutItem("new", b"value")
    assert typical_overshoot(lambda seconds: client.ll_batch_put([item], seconds)) < PROMISED_SECONDS
    backing.go()
    assert client.ll_batch_query(["new"], 30)[0].status in ("ok", "not_found")
