"""The write-back queue."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import signal
import threading
from functools import partial
from typing import Any

import pytest

from kvcsfs import wire
from kvcsfs.sdk import KvcsLowLevelClient, WriteBackQueue


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


def test_a_timeout_of_write_back_is_its_puts(daemon):
    daemon.silent = {wire.Reserve}
    with KvcsLowLevelClient(daemon.path) as client:
        queue = WriteBackQueue(client, deadline_s=0.01)
        queue.submit("a", b"v")
        assert queue.flush(5)
        assert queue.stats()["failed"] == {"ETIMEDOUT": 1}
        queue.close()
