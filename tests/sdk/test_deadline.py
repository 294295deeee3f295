"""Deadlines: a call returns in time whatever hangs, and nothing touches its memory afterwards."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvcsfs import wire
from kvcsfs.errors import KvcsTimeoutError, KvcsUnavailableError
from kvcsfs.sdk import KvcsLowLevelClient, LLGetItemOpt, LLPutItem
from tests.sdk.fake_daemon import FakeDaemon

SLACK_SECONDS = (
    0.2  # the contract says 0.05; the rest is for a machine that runs other tests at the same time
)
VALUE = bytes(range(256)) * 256


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[KvcsLowLevelClient]:
    with KvcsLowLevelClient(daemon.path) as made:
        made.ll_batch_query(["connect"])
        yield made


@pytest.fixture
def disk(monkeypatch) -> Iterator[Disk]:
    made = Disk(monkeypatch)
    yield made
    made.answers.set()


class Disk:
    """Nothing is in the page cache, and the disk answers only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = threading.Event()
        self.asked = threading.Event()
        self.cached: set[bytes] = (
            set()
        )  # values of files in the page cache, or that go there, by their first byte
        self._preadv, self._pwritev = os.preadv, os.pwritev
        monkeypatch.setattr(os, "preadv", self.preadv)
        monkeypatch.setattr(os, "pwritev", self.pwritev)

    def preadv(self, fd: int, buffers: list[bytearray], offset: int, flags: int = 0) -> int:
        if os.pread(fd, 1, 0) not in self.cached:
            if flags & os.RWF_NOWAIT:
                raise BlockingIOError(errno.EAGAIN, "not cached")
            self.asked.set()
            self.answers.wait()
        return self._preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: list[bytes], offset: int) -> int:
        if bytes(buffers[0][:1]) not in self.cached:
            self.asked.set()
            self.answers.wait()
        return self._pwritev(fd, buffers, offset)


def timed(seconds: float, call: Callable[[], Any]) -> Any:
    """Run a call that must end in time; return its result or its exception."""
    begin = time.monotonic()
    try:
        return call()
    except (KvcsTimeoutError, KvcsUnavailableError) as exc:
        return exc
    finally:
        assert time.monotonic() - begin < seconds + SLACK_SECONDS


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_silent_daemon(client, daemon):
    daemon.silent = {wire.Query, wire.Open, wire.Reserve, wire.Delete}
    buffer = bytearray(8)
    for call in (
        lambda: client.ll_batch_query(["a"], 0.05),
        lambda: client.ll_batch_get_items([LLGetItemOpt("a")], 0.05),
        lambda: client.ll_batch_get_into_items([LLGetItemOpt("a")], [buffer], 0.05),
    ):
        assert isinstance(timed(0.05, call), KvcsTimeoutError)
    put = timed(0.05, lambda: client.ll_batch_put([LLPutItem("a", b"v"), LLPutItem("", b"v")], 0.05))
    assert [r.status for r in put] == [-errno.ETIMEDOUT, -errno.EINVAL]
    assert timed(0.05, lambda: client.ll_batch_delete(["a"], 0.05)) == [-errno.ETIMEDOUT]


def test_a_late_reply_is_given_back(client, daemon):
    daemon.store("a", VALUE)
    daemon.silent = {wire.Open, wire.Reserve}
    before = open_fds()
    assert isinstance(
        timed(0.05, lambda: client.ll_batch_get_items([LLGetItemOpt("a")], 0.05)), KvcsTimeoutError
    )
    timed(0.05, lambda: client.ll_batch_put([LLPutItem("b", b"v")], 0.05))
    daemon.silent = set()
    daemon.resume.set()
    assert daemon.wait_for(wire.Release)[0].lease == 77
    assert daemon.wait_for(wire.Abort)[0].tokens == [1]
    wait_until(lambda: open_fds() <= before)
    assert not daemon.reserved


def test_the_rest_of_a_batch_times_out(client, daemon):
    client._core.max_keys = 1
    for key in "ab":
        daemon.store(key, VALUE)
    calls = iter([False, True] * 3)
    answer = daemon._answer

    def every_second_is_silent(sock, request):
        if type(request) in {wire.Open, wire.Query, wire.Delete} and next(calls):
            daemon.resume.wait()
        answer(sock, request)

    daemon._answer = every_second_is_silent
    assert [r.status for r in client.ll_batch_query(["a", "b"], 0.1)] == ["ok", "timeout"]
    daemon.resume.set()


def test_a_daemon_that_does_not_read(client, daemon):
    daemon.silent = {wire.Query}
    keys = [f"{i:0255d}" for i in range(256)]  # a request of 64 KiB: the socket is full after a few
    results = [timed(0.02, lambda: client.ll_batch_query(keys, 0.02)) for _ in range(12)]
    assert all(isinstance(result, KvcsTimeoutError) for result in results)
    daemon.silent = set()
    daemon.resume.set()
    assert client.ll_batch_query(["a"], 5)[0].status == "not_found"  # frames were not torn


def test_connecting_has_its_own_limit(daemon):
    daemon.silent = {wire.Hello}
    with KvcsLowLevelClient(daemon.path, connect_timeout_s=0.05) as client:
        failure = timed(0.05, lambda: client.ll_batch_query(["a"], 10))
        assert isinstance(failure, KvcsUnavailableError)
        assert "did not answer within 0.05 s" in str(failure)
        assert isinstance(timed(0.02, lambda: client.ll_batch_query(["a"], 0.02)), KvcsTimeoutError)
        assert [r.status for r in client.ll_batch_put([LLPutItem("a", b"v")])] == [-errno.ENOTCONN]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("size", [100, 3 << 20, 9 << 20])
def test_a_disk_that_hangs_never_writes_the_callers_memory_later(daemon, disk, size, verify):
    value = bytes([1]) * size
    daemon.store("slow", value)
    daemon.store("fast", b"\x02" * 100)
    disk.cached = {b"\x02"}
    buffers = [bytearray(size), bytearray(100)]
    with KvcsLowLevelClient(daemon.path, max_value_size=1 << 30, verify_reads=verify) as client:
        client.ll_batch_query(["connect"])
        before = open_fds()
        items = [LLGetItemOpt("slow"), LLGetItemOpt("fast")]
        results = timed(0.1, lambda: client.ll_batch_get_into_items(items, buffers, 0.1))
        assert [r.status for r in results] == [-errno.ETIMEDOUT, 100]
        assert disk.asked.is_set()
        assert daemon.wait_for(wire.Release)  # before the call returned, though a worker still reads
        disk.answers.set()
        wait_until(lambda: open_fds() <= before)  # closed by the last worker to come back
        assert buffers == [bytes(size), b"\x02" * 100]
        assert [r.status for r in client.ll_batch_get_into_items(items, buffers)] == [size, 100]
        assert buffers[0] == value


def test_a_read_that_hangs_raises_when_nothing_else_was_read(client, daemon, disk):
    daemon.store("slow", VALUE)
    call = lambda: client.ll_batch_get_items([LLGetItemOpt("slow")], 0.05)  # noqa: E731
    assert isinstance(timed(0.05, call), KvcsTimeoutError)


def test_cached_values_are_read_although_every_worker_hangs(client, daemon, disk):
    for i in range(8):
        daemon.store(f"slow{i}", bytes([1]) * 100)
    daemon.store("fast", b"\x02" * 100)
    disk.cached = {b"\x02"}
    slow = [LLGetItemOpt(f"slow{i}") for i in range(8)]
    assert isinstance(timed(0.05, lambda: client.ll_batch_get_items(slow, 0.05)), KvcsTimeoutError)
    assert client.ll_batch_get_items([LLGetItemOpt("fast")], 1)[0].status == 100


@pytest.mark.parametrize("size", [100, 3 << 20, 100 << 20])
def test_a_put_that_times_out_is_never_committed(daemon, disk, size):
    with KvcsLowLevelClient(daemon.path, max_value_size=1 << 30) as client:
        client.ll_batch_query(["connect"])
        before = open_fds()
        value = bytearray(size)
        results = timed(0.1, lambda: client.ll_batch_put([LLPutItem("a", value)], 0.1))
        assert [r.status for r in results] == [-errno.ETIMEDOUT]
        assert daemon.wait_for(wire.Abort)[0].tokens == [1]
        disk.answers.set()
        wait_until(lambda: open_fds() <= before)
        assert daemon.count()["Commit"] == 0
        assert [r.status for r in client.ll_batch_put([LLPutItem("a", b"again")])] == [0]
        assert daemon.value("a") == b"again"


def test_a_commit_without_an_answer_times_out(client, daemon):
    daemon.silent = {wire.Commit}
    results = timed(0.05, lambda: client.ll_batch_put([LLPutItem("a", b"v")], 0.05))
    assert [r.status for r in results] == [-errno.ETIMEDOUT]
    daemon.resume.set()
    assert client.ll_batch_query(["a"])[0].status == "ok"
    assert daemon.count()["Abort"] == 0


def test_what_was_committed_in_time_is_told(client, daemon, disk):
    """A part's answer is there, and nobody has read it, when the deadline passes beside another part's bytes."""
    disk.cached = {b"\x02"}
    items = [LLPutItem(f"k{i}", b"\x02" if i < 33 else b"\x01") for i in range(65)]
    put = timed(0.3, lambda: client.ll_batch_put(items, 0.3))
    assert [r.status for r in put] == [0] * 33 + [-errno.ETIMEDOUT] * 32


def test_waiting_for_room_ends_with_the_deadline(daemon, disk):
    daemon.points = [wire.MountpointInfo(0, 4 * 8192)]  # one put at a time
    with KvcsLowLevelClient(daemon.path) as client:
        hanging = threading.Thread(target=lambda: client.ll_batch_put([LLPutItem("a", b"v")], 10))
        hanging.start()
        assert disk.asked.wait(5)
        results = timed(0.05, lambda: client.ll_batch_put([LLPutItem("b", b"v")], 0.05))
        assert [r.status for r in results] == [-errno.ETIMEDOUT]
        disk.answers.set()
        hanging.join()
        assert [r.status for r in client.ll_batch_put([LLPutItem("b", b"v")])] == [0]
        assert daemon.value("a") == daemon.value("b") == b"v"


def test_close_is_bounded_while_workers_hang(client, daemon, disk, monkeypatch):
    monkeypatch.setattr("kvcsfs.sdk.client.CLOSE_SECONDS", 0.1)
    daemon.store("slow", VALUE)
    timed(0.05, lambda: client.ll_batch_get_items([LLGetItemOpt("slow")], 0.05))
    timed(0.1, client.close)


def test_a_forked_child_closes_its_copies_of_descriptors_in_use(client, daemon, disk):
    daemon.store("slow", VALUE)
    thread = threading.Thread(target=client.ll_batch_get_items, args=([LLGetItemOpt("slow")],))
    thread.start()
    assert disk.asked.wait(5)
    name = str(daemon.files["slow"][0])
    assert name in links()
    pid = os.fork()
    if pid == 0:
        os._exit(int(name in links()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    disk.answers.set()
    thread.join()


def links() -> set[str]:
    names = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.add(os.readlink(f"/proc/self/fd/{fd}"))
    return names
