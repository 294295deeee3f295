"""The bytes themselves: cutting, hashing, disks that answer in pieces or fail, memory in many places."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from kvcsfs import wire
from kvcsfs.errors import KvcsTimeoutError
from kvcsfs.sdk import BufferPool, KvcsLowLevelClient, LLGetItemOpt, LLPutItem, crew
from kvcsfs.sdk.crew import PROCESSORS, Crew, Seat
from kvcsfs.sdk.deadline import Deadline
from kvcsfs.sdk.reading import Reading, Value
from kvcsfs.sdk.transfer import TASK_BYTES, Transfer, group, ranges
from kvcsfs.sdk.workers import Pool
from tests.sdk.fake_daemon import FakeDaemon

MIB = 1 << 20
RANGE, WHOLE = MIB, 4 * MIB


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch):
    """Cut values up that a test has time to write."""
    for module, name, value in (
        ("transfer", "RANGE_BYTES", RANGE),
        ("reading", "RANGE_BYTES", RANGE),
        ("reading", "WHOLE_BYTES", WHOLE),
        ("writing", "WHOLE_BYTES", WHOLE),
    ):
        monkeypatch.setattr(f"kvcsfs.sdk.{module}.{name}", value)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path, capacity=4 << 30)
    yield fake
    fake.stop()


@pytest.fixture(params=[True, False], ids=["verified", "unverified"])
def client(daemon: FakeDaemon, request: pytest.FixtureRequest) -> Iterator[KvcsLowLevelClient]:
    with KvcsLowLevelClient(daemon.path, max_value_size=1 << 30, verify_reads=request.param) as made:
        yield made


def read(client: KvcsLowLevelClient, key: str) -> bytes | int:
    result = client.ll_batch_get_items([LLGetItemOpt(key)])[0]
    return bytes(result.data) if result.data is not None else result.status


@pytest.fixture
def uncached(monkeypatch):
    """Every read without waiting fails, as for a file that isn't in the page cache."""
    preadv = os.preadv

    def slow(fd, buffers, offset, flags=0):
        if flags & os.RWF_NOWAIT:
            raise BlockingIOError(errno.EAGAIN, "not cached")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)


@pytest.mark.parametrize("size", [1, 512 << 10, (512 << 10) + 1, 9 * MIB + 5, WHOLE + 7])
def test_sizes_around_every_cut(client, daemon, size):
    value = os.urandom(size)
    assert client.ll_batch_put([LLPutItem("a", value)])[0].status == 0
    assert daemon.value("a") == value
    assert read(client, "a") == value


@pytest.mark.parametrize("size", [1, MIB, 3 * MIB + 1, 9 * MIB, WHOLE + 1])
def test_values_that_are_not_in_the_page_cache(client, daemon, uncached, size):
    value = os.urandom(size)
    daemon.store("a", value)
    assert read(client, "a") == value
    buffer = bytearray(size + 1)
    assert client.ll_batch_get_into_items([LLGetItemOpt("a")], [buffer])[0].status == size
    assert buffer == value + b"\0"


def test_reads_that_come_in_pieces(client, daemon, monkeypatch):
    preadv = os.preadv

    def short(fd, buffers, offset, flags=0):
        if flags and offset > MIB:
            raise BlockingIOError(errno.EAGAIN, "not cached")
        return preadv(fd, [memoryview(buffers[0])[:70001]], offset)

    monkeypatch.setattr(os, "preadv", short)
    for size in (100_000, 2 * MIB):
        value = os.urandom(size)
        daemon.store("a", value)
        assert read(client, "a") == value


def test_writes_that_come_in_pieces(client, daemon, monkeypatch):
    pwritev = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, b, at: pwritev(fd, [memoryview(b[0])[:70001]], at))
    value = os.urandom(MIB)
    assert client.ll_batch_put([LLPutItem("a", value)])[0].status == 0
    assert daemon.value("a") == value


def test_writes_that_wait_for_a_disk_get_every_worker(daemon, monkeypatch):
    workers = PROCESSORS + 3
    pwritev = os.pwritev

    def waiting(fd, buffers, at):
        seen.add(threading.get_ident())
        time.sleep(0.02)
        return pwritev(fd, buffers, at)

    seen: set[int] = set()
    monkeypatch.setattr(os, "pwritev", waiting)
    items = [LLPutItem(str(i), bytes(MIB)) for i in range(4 * workers)]
    with KvcsLowLevelClient(daemon.path, set_workers=workers) as client:
        assert all(result.status == 0 for result in client.ll_batch_put(items))
    assert len(seen) == workers


@pytest.mark.parametrize("size", [1000, 5 * MIB, 6 * MIB])
def test_lists_of_buffers_both_ways(client, daemon, size):
    value = os.urandom(size)
    cuts = [0, 1, 1, 7, size // 3, size]
    segments = [value[a:b] for a, b in pairwise(cuts)]
    assert client.ll_batch_put([LLPutItem("a", segments), LLPutItem("b", tuple(segments))])[1].status == 0
    assert daemon.value("a") == daemon.value("b") == value
    buffers = [bytearray(len(s)) for s in segments[:-1]] + [bytearray(len(segments[-1]) + 10)]
    assert client.ll_batch_get_into_items([LLGetItemOpt("a")], [buffers])[0].status == size
    assert b"".join(buffers) == value + bytes(10)
    short = [bytearray(3), bytearray(size - 4)]
    result = client.ll_batch_get_into_items([LLGetItemOpt("a")], [short])[0]
    assert (result.status, result.size) == (-errno.ENOSPC, size)
    assert not any(map(any, short))


def test_more_pieces_than_one_system_call_takes(client, daemon):
    segments = [bytes([i % 251]) * 3 for i in range(3000)]
    assert client.ll_batch_put([LLPutItem("a", segments)])[0].status == 0
    assert daemon.value("a") == b"".join(segments)
    buffers = [bytearray(2) for _ in range(4500)]
    assert client.ll_batch_get_into_items([LLGetItemOpt("a")], [buffers])[0].status == 9000
    assert b"".join(buffers) == b"".join(segments)


@pytest.mark.parametrize("size", [2 * MIB, WHOLE + 1])
@pytest.mark.parametrize("cached", [True, False])
def test_more_pieces_than_one_system_call_takes_in_one_range(client, daemon, size, cached, request):
    """Also of a range that arrived in several calls, or from a disk."""
    if not cached:
        request.getfixturevalue("uncached")
    value = os.urandom(size)
    daemon.store("a", value)
    buffers = [bytearray(500) for _ in range(-(-size // 500))]
    assert client.ll_batch_get_into_items([LLGetItemOpt("a")], [buffers])[0].status == size
    assert b"".join(buffers)[:size] == value


@pytest.mark.parametrize("size", [1000, 3 * MIB, 6 * MIB])
@pytest.mark.parametrize("cached", [True, False])
def test_bytes_that_fail_their_checksum_are_a_miss_and_reported(daemon, size, cached, request):
    if not cached:
        request.getfixturevalue("uncached")
    daemon.store("bad", bytes(size), checksum=bytes(16))
    daemon.store("good", b"v")
    with KvcsLowLevelClient(daemon.path, max_value_size=1 << 30) as client:
        got = client.ll_batch_get_items([LLGetItemOpt("good"), LLGetItemOpt("bad")])
        assert [(r.status, r.data, r.size) for r in got] == [(1, b"v", 1), (0, None, 0)]
        assert daemon.wait_for(wire.Check)[0].keys == ["bad"]
        assert client.ll_batch_query(["bad"])[0].status == "not_found"


def test_verification_can_be_turned_off_but_not_for_the_unproven(daemon):
    daemon.store("bad", b"vv", checksum=bytes(16))
    with KvcsLowLevelClient(daemon.path, verify_reads=False) as client:
        assert read(client, "bad") == b"vv"
        daemon.flags = wire.UNPROVEN
        assert read(client, "bad") == 0
        assert daemon.wait_for(wire.Check)[0].keys == ["bad"]


@pytest.mark.parametrize("size", [1000, 3 * MIB, 20 * MIB])
def test_a_file_that_ends_early_is_a_miss_and_reported(client, daemon, size):
    daemon.store("short", bytes(size - 1), size=size)
    assert read(client, "short") == 0
    assert daemon.wait_for(wire.Check)[0].keys == ["short"]


def test_a_disk_that_fails_to_read(client, daemon, monkeypatch):
    daemon.store("bad", b"x" * 10)
    daemon.store("good", b"v")
    preadv = os.preadv

    def failing(fd, buffers, offset, flags=0):
        if os.pread(fd, 1, 0) == b"x":
            raise OSError(errno.ESTALE, "gone")
        return preadv(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", failing)
    got = client.ll_batch_get_items([LLGetItemOpt("bad"), LLGetItemOpt("good")])
    assert [(r.status, r.data) for r in got] == [(-errno.EIO, None), (1, b"v")]


@pytest.mark.parametrize(
    ("raised", "status"),
    [(errno.ENOSPC, -errno.ENOSPC), (errno.EDQUOT, -errno.ENOSPC), (errno.EROFS, -errno.EIO)],
)
@pytest.mark.parametrize("size", [10, MIB, 6 * MIB])
def test_a_disk_that_fails_to_write_fails_that_key_alone(client, daemon, monkeypatch, raised, status, size):
    pwritev = os.pwritev

    def failing(fd, buffers, offset):
        if bytes(memoryview(buffers[0])[:1]) == b"x":
            raise OSError(raised, "as the test says")
        return pwritev(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", failing)
    results = client.ll_batch_put([LLPutItem("bad", b"x" * size), LLPutItem("good", b"v")])
    assert [r.status for r in results] == [status, 0]
    assert daemon.wait_for(wire.Abort)[0].tokens == [1]
    assert daemon.wait_for(wire.Commit)[0].tokens == [2]
    assert list(daemon.files) == ["good"]


def test_nothing_waits_for_a_worker_where_files_lie_in_memory(tmp_path):
    daemon = FakeDaemon(tmp_path, in_memory=True)
    with KvcsLowLevelClient(daemon.path) as client:
        assert client.ll_batch_put([LLPutItem("a", b"v")])[0].status == 0
        assert read(client, "a") == b"v"
        assert not client._core.getters._threads
    daemon.stop()


@pytest.fixture
def direct(daemon: FakeDaemon) -> None:
    daemon.points, daemon.open_flags = [wire.MountpointInfo(0, 4 << 30, False, 4096)], os.O_DIRECT


@pytest.mark.parametrize("size", [1, 4096, 8192 + 1, 3 * MIB, 9 * MIB + 77, WHOLE + 4097])
def test_direct_io_from_and_to_any_memory(client, daemon, direct, size):
    value = os.urandom(size)
    segments = [value[: size // 3], value[size // 3 :]]
    assert [r.status for r in client.ll_batch_put([LLPutItem("a", value), LLPutItem("b", segments)])] == [
        0,
        0,
    ]
    assert daemon.value("a") == daemon.value("b") == value
    assert read(client, "a") == value
    odd = memoryview(bytearray(size + 2))[1:-1]
    halves = [bytearray(size // 2), bytearray(size - size // 2)]
    results = client.ll_batch_get_into_items([LLGetItemOpt("a"), LLGetItemOpt("b")], [odd, halves])
    assert [r.status for r in results] == [size] * 2
    assert odd == b"".join(halves) == value


@pytest.mark.parametrize("size", [4096, 3 * MIB + 5, 9 * MIB])
def test_direct_io_goes_straight_into_and_out_of_a_pools_buffer(client, daemon, direct, monkeypatch, size):
    value = os.urandom(size)
    pool = BufferPool(1, size)
    with pool.take(1) as buffers:
        buffers[0][:] = value
        assert client.ll_batch_put([LLPutItem("a", buffers[0])])[0].status == 0
        buffers[0][:] = bytes(size)
        copied: list[int] = []
        copying = Reading._read_copying

        def noting(self: Reading, seat: Seat, value: Value, start: int, end: int) -> None:
            copied.append(end - start)
            copying(self, seat, value, start, end)

        monkeypatch.setattr(Reading, "_read_copying", noting)
        assert client.ll_batch_get_into_items([LLGetItemOpt("a")], buffers)[0].status == size
        assert buffers[0] == value
        assert sum(copied) == size % 4096  # only a last piece of less than a block


def test_a_pools_buffer_stays_out_of_use_while_a_worker_reads_into_it(daemon, direct, monkeypatch):
    preadv, asked, answers = os.preadv, threading.Event(), threading.Event()

    def hanging(fd, buffers, offset, flags=0):
        asked.set()
        answers.wait()
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", hanging)
    daemon.store("a", b"x" * 8192)
    pool = BufferPool(1, 8192)
    with KvcsLowLevelClient(daemon.path) as client:
        with pool.take(1) as buffers, pytest.raises(KvcsTimeoutError):
            client.ll_batch_get_into_items([LLGetItemOpt("a")], buffers, 0.3)
        assert asked.is_set()
        with pytest.raises(TimeoutError), pool.take(1, timeout_s=0.01):
            pass
        answers.set()
        with pool.take(1, timeout_s=5) as buffers:
            assert len(buffers[0]) == 8192


def test_a_worker_goes_on_after_work_that_raises(expected_warnings):
    """Else what is queued would wait for the deadline, with nobody there to do it."""
    expected_warnings.append("a worker's job failed")
    pool, done, closed = Pool("test", 4), threading.Event(), threading.Event()
    transfer = Transfer(Crew(pool, 1), set(), closed.set)
    transfer.add([(_raising, ()), (lambda _seat: done.set(), ())], slow=True)
    assert transfer.finish(Deadline(5))
    assert done.is_set() and closed.is_set()
    pool.close()


@pytest.mark.parametrize(("waits_for", "threads"), [("disk", 4), ("processor", 1)])
def test_threads_are_added_for_a_disk_and_not_for_a_processor(monkeypatch, waits_for, threads):
    """What is ready and has no processor is not helped by one more that wants it."""
    monkeypatch.setattr(
        crew,
        "queued_seconds",
        lambda: time.monotonic() if waits_for == "processor" else 0.0,
    )
    pool, seen = Pool("test", 4), set()

    def piece(_seat: Seat) -> None:
        seen.add(threading.get_ident())
        time.sleep(0.005)

    moving = Transfer(Crew(pool, 1), set(), lambda: None)
    moving.add([(piece, ())] * 40, slow=True)
    assert moving.finish(Deadline(5))
    assert len(seen) == threads
    pool.close()


def test_the_kernel_counts_the_time_without_a_processor():
    processor = min(os.sched_getaffinity(0))
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as other, ThreadPoolExecutor(1) as thread:
        try:
            os.sched_setaffinity(other.pid, {processor})
            waited = thread.submit(_spin, processor, 0.2).result()
        finally:
            other.kill()
    assert 0.02 < waited < 10


def _spin(processor: int, seconds: float) -> float:
    os.sched_setaffinity(0, {processor})  # of this thread
    before, end = crew.queued_seconds(), time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    return crew.queued_seconds() - before


def _raising(_seat: Seat) -> None:
    raise MemoryError


def test_work_is_cut_by_bytes():
    runs, large = group([64 << 10] * 256, RANGE)
    assert {end - first for first, end in runs} == {TASK_BYTES // (64 << 10)}
    assert (runs[0][0], runs[-1][1], large) == (0, 256, [])
    assert group([4 * MIB] * 3, 8 * MIB) == ([(0, 1), (1, 2), (2, 3)], [])
    assert group([1, 100 * MIB, 1], RANGE) == ([(0, 1), (2, 3)], [1])
    assert group([], 1) == ([], [])
    assert [end - start for start, end in ranges(2 * RANGE + 1)] == [RANGE, RANGE, 1]
