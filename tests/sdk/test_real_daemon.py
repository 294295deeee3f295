"""The SDK against the real daemon in a process of its own: data, stops, kills, restarts."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcsfs.errors import KvcsTimeoutError, KvcsUnavailableError
from kvcsfs.sdk import KvcsLowLevelClient, LLBatchOptions, LLGetItemOpt, LLPutItem
from tests.deadlines import PROMISED_SECONDS, typical_overshoot

MIB = 1 << 20


class Daemon:
    def __init__(self, directory: Path) -> None:
        self.directory, self.socket = directory, str(directory / "kvcs.sock")
        (directory / "data").mkdir()
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "kvcsfs.cli", "serve", "--data", str(self.directory / "data")]
        self.process = subprocess.Popen(
            [*command, "--capacity", "64MiB", "--socket", self.socket],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self.process.stdout is not None
        assert b"ready" in self.process.stdout.readline()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    made = Daemon(tmp_path_factory.mktemp("daemon"))
    yield made
    made.stop()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[KvcsLowLevelClient]:
    with KvcsLowLevelClient(daemon.socket, max_value_size=256 * MIB) as made:
        yield made


def put(
    client: KvcsLowLevelClient, values: dict[str, bytes], opts: LLBatchOptions | None = None
) -> list[int]:
    return [r.status for r in client.ll_batch_put([LLPutItem(k, v) for k, v in values.items()], opts=opts)]


def get(client: KvcsLowLevelClient, *keys: str) -> list[bytes | int]:
    results = client.ll_batch_get_items([LLGetItemOpt(key) for key in keys])
    return [bytes(r.data) if r.data is not None else r.status for r in results]


def test_values_come_back(client):
    values = {f"back/{i}": os.urandom(1 + i * 997) for i in range(300)} | {"back/large": os.urandom(9 * MIB)}
    assert put(client, values) == [0] * 301
    assert get(client, *values) == list(values.values())
    buffers = [[bytearray(1), bytearray(len(v) - 1)] for v in values.values()]
    results = client.ll_batch_get_into_items([LLGetItemOpt(key) for key in values], buffers)
    assert [r.status for r in results] == [len(v) for v in values.values()]
    assert [b"".join(pair) for pair in buffers] == list(values.values())
    assert [r.total_size for r in client.ll_batch_query(list(values))] == [len(v) for v in values.values()]
    assert put(client, dict.fromkeys(values, b"new"), LLBatchOptions(if_exists="keep")) == [0] * 301
    assert put(client, {"back/0": b"new"}, LLBatchOptions(if_exists="error")) == [-errno.EEXIST]
    assert get(client, "back/0") == [values["back/0"]]
    assert client.ll_batch_delete(["back/0", "back/0"]) == [0, -errno.ENOENT]


def test_a_full_cache_takes_every_put(client):
    for turn in range(8):
        values = {f"full/{turn}/{i}": os.urandom(MIB) for i in range(20)}
        assert put(client, values) == [0] * 20
        assert get(client, *values) == list(values.values())
    assert put(client, {"full/huge": bytes(65 * MIB)}) == [-errno.ENOSPC]


def test_threads_and_duplicate_keys(client):
    failures: list[object] = []

    def work(t: int) -> None:
        for turn in range(20):
            value = bytes([t]) * (1000 + turn)
            statuses = client.ll_batch_put(
                [LLPutItem(f"thread/{t}", b"old"), LLPutItem(f"thread/{t}", value)]
            )
            if [r.status for r in statuses] != [0, 0] or get(client, f"thread/{t}") != [value]:
                failures.append((t, turn, statuses))

    threads = [threading.Thread(target=work, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_stopped_daemon_and_one_that_comes_back(client, daemon):
    assert put(client, {"stop": b"value"}) == [0]
    daemon.process.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    for call in (lambda: get(client, "stop"), lambda: client.ll_batch_query(["stop"], 0.1)):
        client._default_seconds = 0.1
        with pytest.raises(KvcsTimeoutError):
            call()
    assert [r.status for r in client.ll_batch_put([LLPutItem("stop", b"new")], 0.1)] == [-errno.ETIMEDOUT]
    assert time.monotonic() - begin < 0.3 + 3 * 0.1
    buffer = bytearray(5)
    for timed in (
        lambda seconds: client.ll_batch_query(["stop"], seconds),
        lambda seconds: client.ll_batch_get_into_items([LLGetItemOpt("stop")], [buffer], seconds),
        lambda seconds: client.ll_batch_put([LLPutItem("stop", b"new")], seconds),
        lambda seconds: client.ll_batch_delete(["another"], seconds),
    ):
        assert typical_overshoot(timed) < PROMISED_SECONDS
    daemon.process.send_signal(signal.SIGCONT)
    client._default_seconds = 10
    assert get(client, "stop") == [b"value"]
    assert put(client, {"stop": b"again"}) == [0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_needs_no_new_client(client, daemon, number):
    assert put(client, {"kept": b"value"}) == [0]
    daemon.stop(number)
    with pytest.raises(KvcsUnavailableError):
        get(client, "kept")
    assert put(client, {"kept": b"new"}) == [-errno.ENOTCONN]
    daemon.start()
    end = time.monotonic() + 10  # recovery may still run
    while get(client, "kept") != [b"value"]:
        assert time.monotonic() < end
        time.sleep(0.01)
