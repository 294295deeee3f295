"""The client's metrics and its report."""

from __future__ import annotations

import errno
import math
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvcsfs import wire
from kvcsfs.errors import KvcsUnavailableError
from kvcsfs.sdk import KvcsLowLevelClient, LLGetItemOpt, LLPutItem
from kvcsfs.sdk.metrics import Meter, Recorder, Reporter


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
