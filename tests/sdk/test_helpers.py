"""Buffers, their checks and their pool; metrics; the write-back queue."""

from __future__ import annotations

import array
import asyncio
import ctypes
import errno
import math
import mmap
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from typing import Any, ClassVar

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvcsfs import wire
from kvcsfs.errors import KvcsUnavailableError
from kvcsfs.sdk import BufferPool, KvcsLowLevelClient, LLGetItemOpt, LLPutItem, WriteBackQueue
from kvcsfs.sdk.buffers import check_source, check_targets, cut, uninitialised
from kvcsfs.sdk.metrics import Meter, Recorder, Reporter

# -- buffers


def test_buffers_of_any_item_size_are_bytes(daemon):
    numbers: Any = array.array("d", range(10))
    with KvcsLowLevelClient(daemon.path) as client:
        assert client.ll_batch_put([LLPutItem("a", numbers)])[0].status == 0
        out: Any = array.array("d", bytes(80))
        grid = memoryview(bytearray(80)).cast("B").cast("d", (2, 5))
        pages = mmap.mmap(-1, 4096)
        results = client.ll_batch_get_into_items([LLGetItemOpt("a")] * 3, [out, grid, pages])
        assert [r.status for r in results] == [80] * 3
        assert out == numbers
        assert grid.tobytes() == pages[:80] == numbers.tobytes()


def test_pieces_of_any_kind_are_bytes():
    made = (ctypes.c_ubyte * 6)()
    ((first, second),) = check_targets([(memoryview(made), memoryview(bytearray(2)))])
    first[:2], second[:] = b"ab", b"cd"  # views of other formats take no bytes
    assert bytes(made) == b"ab\0\0\0\0"
    assert check_source([memoryview(made), b"x"], "value") == [b"ab\0\0\0\0", b"x"]


BASE, PAGES = bytearray(100), mmap.mmap(-1, 4096)


class Named(ctypes.Structure):
    _fields_: ClassVar = [("Of", ctypes.c_int), ("any", ctypes.py_object)]


class Plain(ctypes.Structure):
    _fields_: ClassVar = [("Of", ctypes.c_int)]


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ([b"read only"], r"buffers\[0\] must be writable"),
        ([bytearray(1), memoryview(BASE)[::2]], r"buffers\[1\] must be contiguous"),
        ([BASE, BASE], "given twice"),
        ([BASE, memoryview(BASE)[50:60]], "share memory"),
        ([memoryview(BASE)[:51], memoryview(BASE)[50:]], "share memory"),
        ([[memoryview(BASE)[:51], memoryview(BASE)[50:]]], "share memory"),
        ([memoryview(PAGES)[:51], memoryview(PAGES)[50:]], "share memory"),
        ([memoryview(BASE), memoryview(PAGES), memoryview(BASE)], "share memory"),
        ([[bytearray(1), b"x"]], r"buffers\[0\]\[1\] must be writable"),
        (
            [(ctypes.py_object * 2)()],
            r"buffers\[0\] has elements of format '<?O', which are no bytes but objects",
        ),
        ([bytearray(1), Named()], r"buffers\[1\] has elements of format"),
    ],
)
def test_buffers_that_can_not_be_read_into(buffers, message):
    with pytest.raises(ValueError, match=message):
        check_targets(buffers)


def test_neighbours_in_one_memory_are_fine():
    base = memoryview(bytearray(100))
    assert len(check_targets([base[:50], base[50:], [base[:0], bytearray(3)]])) == 3


def test_a_structs_names_are_no_types():
    structure: Any = Plain()
    (target,) = check_targets([structure])
    assert len(target) == 4


def test_numbers_of_buffers_and_items_must_agree(tmp_path):
    with KvcsLowLevelClient(tmp_path / "none") as client, pytest.raises(ValueError, match="2 items need"):
        client.ll_batch_get_into_items([LLGetItemOpt("a"), LLGetItemOpt("b")], [bytearray(1)])


def test_a_value_that_is_not_contiguous(tmp_path):
    with KvcsLowLevelClient(tmp_path / "none") as client, pytest.raises(ValueError, match="contiguous"):
        client.ll_batch_put([LLPutItem("a", memoryview(b"abcdef")[::2])])
    assert check_source(memoryview(b"").cast("B"), "value") == b""


def test_cutting_views():
    views = [memoryview(b"abc"), memoryview(b""), memoryview(b"defg")]
    assert b"".join(cut(views, 2, 3, 99)) == b"cde"
    assert b"".join(cut(views, 0, 7, 1)) == b"abc"
    assert cut(views, 7, 1, 99) == []


def test_memory_that_is_not_filled():
    made = uninitialised(1 << 20)
    assert type(made) is bytearray
    assert len(made) == 1 << 20
    made[:] = b"x" * len(made)
    made.append(1)


def test_a_pool_lends_pages_and_takes_them_back():
    pool = BufferPool(3, 5000)
    with pool.take(2) as lent:
        assert [len(view) for view in lent] == [5000, 5000]
        check_targets(lent)
        with pytest.raises(TimeoutError, match="2 buffers"), pool.take(2, timeout_s=0.001):
            pass
        lent[0][:1] = b"x"
    with pool.take(3) as lent:
        assert sorted(bytes(view[:1]) for view in lent) == [b"\0", b"\0", b"x"]  # the same memory again
    with pytest.raises(ValueError, match="3 buffers"), pool.take(4):
        pass
    with pytest.raises(ValueError, match="at least 1"):
        BufferPool(0, 1)


def test_a_pool_grows():
    pool = BufferPool(2, 4096)
    with pool.take(1) as held:
        pool.grow(10_000)
        with pool.take(1) as lent:
            assert len(lent[0]) == 10_000
        assert len(held[0]) == 4096
    with pool.take(2) as lent:
        assert [len(view) for view in lent] == [10_000] * 2


def test_a_pool_that_can_not_grow_keeps_its_buffers():
    pool = BufferPool(2, 4096)
    pool.grow(1 << 50)
    for _ in range(3):
        with pytest.raises(OSError, match="Cannot allocate memory"), pool.take(1, timeout_s=1):
            pass


def test_a_waiting_take_gets_what_is_returned():
    pool, got = BufferPool(1, 1), threading.Event()

    def take() -> None:
        with pool.take(1, timeout_s=math.inf):
            got.set()

    with pool.take(1):
        thread = threading.Thread(target=take)
        thread.start()
        assert not got.is_set()
    assert got.wait(5)
    thread.join()


# -- metrics


def test_metrics_count_what_happened(daemon):
    with KvcsLowLevelClient(daemon.path, enable_metrics=True) as client:
        daemon.statuses = {"full": -errno.ENOSPC}
        client.ll_batch_put([LLPutItem("a", b"123"), LLPutItem("full", b"45")])
        client.ll_batch_get_items([LLGetItemOpt("a"), LLGetItemOpt("none")])
        client.ll_batch_query(["a", ""])
        client.ll_batch_delete(["a", "a"])
        metrics = client.get_metrics()
        assert metrics["enabled"] is True
        ops = metrics["ops"]
        names = ("success", "miss", "error", "keys", "bytes", "batches")
        counts = {op: tuple(ops[op][name] for name in names) for op in ops}
        assert counts == {
            "put": (1, 0, 1, 2, 3, 1),
            "get": (1, 1, 0, 2, 3, 1),
            "exists": (1, 0, 1, 2, 0, 1),
            "delete": (1, 1, 0, 2, 0, 1),
        }
        assert ops["put"]["errors"] == {"ENOSPC": 1}
        assert ops["exists"]["errors"] == {"EINVAL": 1}
        assert set(ops["put"]["phases"]) == {"queue", "request", "transfer", "commit"}
        assert set(ops["get"]["phases"]) == {"queue", "request", "transfer"}
        latency = ops["get"]["latency"]
        assert latency["count"] == 1
        assert 0 < latency["p50"] == latency["p99"] == latency["max"] == latency["sum"]
        families = {f.name: f for f in text_string_to_metric_families(client.get_metrics_text())}
        samples = {
            (s.name, *sorted(s.labels.values())): s.value for f in families.values() for s in f.samples
        }
        assert samples["kvcs_client_ops_total", "get", "miss"] == 1
        assert samples["kvcs_client_errors_total", "ENOSPC", "put"] == 1
        assert samples["kvcs_client_keys_total", "put"] == 2
        assert samples["kvcs_client_bytes_total", "get"] == 3
        assert samples["kvcs_client_batches_total", "delete"] == 1
        assert samples["kvcs_client_batch_latency_seconds_bucket", "+Inf", "get"] == 1
        assert (
            samples["kvcs_client_inflight_batches", "get"] == samples["kvcs_client_inflight_keys", "get"] == 0
        )
        assert samples["kvcs_client_phase_seconds_count", "commit", "put"] == 1


def test_failures_of_whole_calls_are_counted(tmp_path):
    with KvcsLowLevelClient(tmp_path / "none", enable_metrics=True) as client:
        with pytest.raises(KvcsUnavailableError):
            client.ll_batch_get_items([LLGetItemOpt("a"), LLGetItemOpt("b")])
        client.ll_batch_put([LLPutItem("a", b"v")])
        ops = client.get_metrics()["ops"]
        assert (ops["get"]["error"], ops["get"]["errors"]) == (2, {"ENOTCONN": 2})
        assert (ops["put"]["error"], ops["put"]["bytes"]) == (1, 0)


def test_what_is_under_way_shows(daemon):
    daemon.silent = {wire.Query}
    with KvcsLowLevelClient(daemon.path, enable_metrics=True) as client:
        thread = threading.Thread(target=client.ll_batch_query, args=(["a", "b"],))
        thread.start()
        daemon.wait_for(wire.Query)
        exists = client.get_metrics()["ops"]["exists"]
        daemon.resume.set()
        thread.join()
        assert (exists["inflight_batches"], exists["inflight_keys"]) == (1, 2)
        assert client.get_metrics()["ops"]["exists"]["inflight_keys"] == 0


def test_metrics_are_off_by_default(tmp_path):
    with KvcsLowLevelClient(tmp_path / "none") as client:
        assert client.get_metrics() == {"enabled": False, "ops": {}}
        assert client.get_metrics_text() == ""


def test_percentiles():
    recorder = Recorder()
    assert recorder.summary() == {"count": 0, "sum": 0, "max": 0, "p50": 0, "p90": 0, "p99": 0}
    for i in range(1, 1001):
        recorder.add(i / 1000)
    summary = recorder.summary()
    assert summary["count"] == 1000
    assert summary["max"] == 1.0
    for name, exact in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert exact <= summary[name] <= exact * 1.1


def test_the_report_is_written_to_its_file(daemon, tmp_path):
    log = tmp_path / "kvcs.log"
    with KvcsLowLevelClient(daemon.path, perf_report_interval_sec=0.02, log_path=log) as client:
        client.ll_batch_query(["a"])
        assert client.get_metrics() == {"enabled": False, "ops": {}}
        done = threading.Event()
        for _ in range(200):
            if log.exists() and log.read_text():
                break
            done.wait(0.02)
        assert "exists: 1 batches, 50 keys/s, 0.0 MB/s, p50 " in log.read_text()


def test_a_report_that_never_comes_is_waited_for(daemon, monkeypatch):
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    with KvcsLowLevelClient(daemon.path, perf_report_interval_sec=math.inf) as client:
        client.ll_batch_query(["a"])
        (report,) = (thread for thread in threading.enumerate() if thread.name == "kvcs-report")
        assert report.is_alive()
    report.join(5)
    assert not failed


def test_a_report_has_what_happened_since_the_last():
    meter = Meter()
    reporter = Reporter(meter, 1000, None)
    with meter.batch("get", [5, 0], [5, 0]):
        pass
    assert [line.split(",")[0] for line in reporter.lines()] == ["get: 1 batches"]
    assert reporter.lines() == []
    reporter.close()


# -- write-back


def test_write_back_puts_in_batches_and_tells(daemon):
    statuses: list[int] = []
    with KvcsLowLevelClient(daemon.path) as client:
        queue = WriteBackQueue(client, max_bytes=100, max_items=10)
        daemon.silent = {wire.Reserve}
        assert queue.submit("first", b"v", statuses.append)
        daemon.wait_for(wire.Reserve)  # the rest gathers behind it
        daemon.statuses = {"full": -errno.ENOSPC}
        assert queue.submit("a", bytearray(10), statuses.append)
        assert queue.submit("full", [b"x", b"y"], statuses.append)
        assert queue.stats()["queued_items"] == 3
        assert queue.stats()["queued_bytes"] == 13
        assert not queue.flush(0.01)
        daemon.silent = set()
        daemon.resume.set()
        assert queue.flush(5)
        assert statuses == [0, 0, -errno.ENOSPC]
        assert [r.keys for r in daemon.wait_for(wire.Reserve)] == [["first"], ["a", "full"]]
        assert queue.stats() == {
            "ok": 2, "failed": {"ENOSPC": 1}, "dropped": 0, "queued_items": 0, "queued_bytes": 0,
        }  # fmt: skip
        queue.close()
        assert not queue.submit("late", b"v")


def test_write_back_drops_what_does_not_fit(daemon):
    daemon.silent = {wire.Reserve}
    with KvcsLowLevelClient(daemon.path) as client:
        queue = WriteBackQueue(client, max_bytes=10, max_items=2)
        assert queue.submit("a", bytes(8))
        assert not queue.submit("b", bytes(3))
        assert queue.submit("c", bytes(2))
        assert not queue.submit("d", b"")
        assert queue.stats()["dropped"] == 2
        daemon.resume.set()
        queue.close()
        assert queue.stats()["ok"] == 2
        assert sorted(daemon.files) == ["a", "c"]


def test_write_back_survives_a_callback_and_a_client_that_fail(daemon, caplog):
    client = KvcsLowLevelClient(daemon.path)
    queue = WriteBackQueue(client)
    statuses: list[int] = []

    def failing(status: int) -> None:
        raise RuntimeError("as the test says")

    assert queue.submit("a", b"v", failing)
    assert queue.flush(5)
    assert "on_done of key 'a' failed" in caplog.text
    client.close()
    assert queue.submit("b", b"v", statuses.append)
    assert queue.flush(5)
    assert statuses == [-errno.EBADF]
    text: Any = "text"
    with pytest.raises(TypeError):
        queue.submit("c", text)
    queue.close()


@pytest.mark.parametrize(
    "arguments", [{"deadline_s": -1}, {"deadline_s": "1"}, {"opts": {}}, {"max_bytes": 0}, {"max_items": 0}]
)
def test_write_back_refuses_what_no_put_takes(tmp_path, arguments):
    with KvcsLowLevelClient(tmp_path / "none") as client, pytest.raises((TypeError, ValueError)):
        WriteBackQueue(client, **arguments)


def test_a_cancelled_callback_does_not_end_write_back(daemon, caplog):
    def cancelled(status: int) -> None:
        raise asyncio.CancelledError

    statuses: list[int] = []
    with KvcsLowLevelClient(daemon.path) as client:
        queue = WriteBackQueue(client)
        assert queue.submit("a", b"v", cancelled)
        assert queue.flush(math.inf)
        assert queue.submit("b", b"v", statuses.append)
        assert queue.flush(5)
        queue.close()
    assert statuses == [0]
    assert "on_done of key 'a' failed" in caplog.text


def test_memory_freed_while_it_was_queued_loses_its_own_value_alone(daemon, caplog):
    held, statuses = threading.Event(), {}
    with KvcsLowLevelClient(daemon.path) as client:
        queue = WriteBackQueue(client)
        assert queue.submit("first", b"v", lambda _: held.wait(5))
        freed = memoryview(bytearray(b"v"))
        for key, value in {"a": b"v", "freed": freed, "b": b"v"}.items():
            assert queue.submit(key, value, partial(statuses.__setitem__, key))
        freed.release()
        held.set()
        assert queue.flush(5)
        assert statuses == {"a": 0, "freed": -errno.EIO, "b": 0}
        assert queue.stats()["failed"] == {"EIO": 1}
        queue.close()
    assert "the value of key 'freed' was lost" in caplog.text


def test_a_forked_child_drops_what_its_parents_queue_would_take(daemon):
    with KvcsLowLevelClient(daemon.path) as client:
        queue = WriteBackQueue(client)
        daemon.silent = {wire.Reserve}
        assert queue.submit("a", b"v")
        daemon.wait_for(wire.Reserve)
        child = os.fork()
        if not child:
            signal.alarm(20)  # ends a flush that waits for ever
            os._exit(0 if not queue.submit("b", b"v") and not queue.flush() else 1)
        assert os.waitpid(child, 0)[1] == 0
        queue.close(0.01)


def test_closing_write_back_drops_what_is_left(daemon):
    daemon.silent = {wire.Reserve}
    statuses: list[int] = []
    with KvcsLowLevelClient(daemon.path) as client:
        queue = WriteBackQueue(client)
        assert queue.submit("a", b"v")
        daemon.wait_for(wire.Reserve)
        assert queue.submit("b", b"v", statuses.append)
        queue.close(0.01)
        assert statuses == [-errno.ECANCELED]
        assert queue.stats()["dropped"] == 1


# -- the import


def test_importing_the_sdk_brings_nothing_heavy():
    code = "import kvcsfs.sdk, sys; print(*{'trio', 'pyfuse3', 'prometheus_client', 'asyncio'} & set(sys.modules))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == ""
    )


def test_a_timeout_of_write_back_is_its_puts(daemon):
    daemon.silent = {wire.Reserve}
    with KvcsLowLevelClient(daemon.path) as client:
        queue = WriteBackQueue(client, deadline_s=0.01)
        queue.submit("a", b"v")
        assert queue.flush(5)
        assert queue.stats()["failed"] == {"ETIMEDOUT": 1}
        queue.close()
