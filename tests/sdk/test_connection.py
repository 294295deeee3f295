"""One connection, many threads: frames, restarts, garbage, forks, and nothing left open."""

from __future__ import annotations

import errno
import gc
import os
import resource
import threading

import pytest

from kvcsfs import wire
from kvcsfs.errors import KvcsClosedError, KvcsUnavailableError
from kvcsfs.sdk import KvcsLowLevelClient, LLGetItemOpt, LLPutItem
from kvcsfs.sdk.connection import close_fds


def get(client: KvcsLowLevelClient, *keys: str) -> list[int]:
    return [r.status for r in client.ll_batch_get_items([LLGetItemOpt(k) for k in keys])]


def put(client: KvcsLowLevelClient, *keys: str) -> list[int]:
    return [r.status for r in client.ll_batch_put([LLPutItem(k, k.encode()) for k in keys])]


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("per_frame", [1, 2, 253])
def test_replies_in_several_frames(client, daemon, per_frame):
    daemon.per_frame = per_frame
    keys = [f"k{i}" for i in range(7)]
    assert put(client, *keys) == [0] * 7
    asked = ["none", *keys, "none", "none"]
    got = client.ll_batch_get_items([LLGetItemOpt(key) for key in asked])
    assert [None if r.data is None else r.data.decode() for r in got] == [None, *keys, None, None]


def test_a_batch_of_more_descriptors_than_one_message_carries(daemon):
    keys = [f"k{i}" for i in range(300)]
    with KvcsLowLevelClient(daemon.path, max_keys_per_batch=300) as client:
        assert put(client, *keys) == [0] * 300
        got = client.ll_batch_get_items([LLGetItemOpt(key) for key in keys])
        assert [bytes(r.data or b"") for r in got] == [key.encode() for key in keys]
        assert daemon.count()["Open"] == 1


def test_a_restart_between_calls_goes_unnoticed(client, daemon):
    assert put(client, "a") == [0]
    for call in (
        lambda: get(client, "a") == [1],
        lambda: client.ll_batch_query(["a"])[0].exists,
        lambda: put(client, "b") == [0],
        lambda: client.ll_batch_delete(["b"]) == [0],
    ):
        daemon.stop()
        daemon.start()
        assert call()


def test_a_daemon_that_is_gone_and_comes_back(client, daemon):
    assert put(client, "a") == [0]
    daemon.stop()
    with pytest.raises(KvcsUnavailableError):
        get(client, "a")
    assert put(client, "a") == client.ll_batch_delete(["a"]) == [-errno.ENOTCONN]
    daemon.start()
    assert get(client, "a") == [1]


def test_a_daemon_that_dies_in_the_middle(client, daemon):
    daemon.dies_on = {wire.Open, wire.Query, wire.Reserve, wire.Delete}
    for call in (lambda: client.ll_batch_query(["a"]), lambda: get(client, "a")):
        with pytest.raises(KvcsUnavailableError, match="closed the connection"):
            call()
    assert put(client, "a") == client.ll_batch_delete(["a"]) == [-errno.ENOTCONN]
    daemon.dies_on = set()
    assert put(client, "a") == [0]


def test_a_commit_is_never_sent_twice(client, daemon):
    assert put(client, "a") == [0]
    daemon.dies_on = {wire.Commit}
    assert put(client, "b") == [-errno.ENOTCONN]
    assert daemon.count()["Commit"] == 2


@pytest.mark.parametrize("kind", [wire.Hello, wire.Open])
def test_garbage_ends_the_connection_alone(client, daemon, kind):
    daemon.store("a", b"v")
    daemon.garbage_on = {kind}
    with pytest.raises(KvcsUnavailableError, match="can't be read"):
        get(client, "a")
    daemon.garbage_on = set()
    assert get(client, "a") == [1]


def test_another_version_is_refused_with_a_clear_message(client, daemon):
    daemon.version = 2
    with pytest.raises(KvcsUnavailableError, match="another version"):
        get(client, "a")
    daemon.version, daemon.fails = 1, {wire.Hello: errno.EPROTO}
    with pytest.raises(KvcsUnavailableError, match="refused: as the test says"):
        get(client, "a")


def test_a_failed_request_is_a_status_for_each_key(client, daemon):
    daemon.fails = {
        wire.Open: errno.EIO,
        wire.Query: errno.EIO,
        wire.Reserve: errno.EBUSY,
        wire.Commit: errno.EIO,
    }
    assert get(client, "a", "b") == [-errno.EIO] * 2
    assert [r.status for r in client.ll_batch_query(["a"])] == ["unavailable"]
    assert put(client, "a") == [-errno.EBUSY]
    del daemon.fails[wire.Reserve]
    assert put(client, "a") == [-errno.EIO]


def test_many_threads_share_one_connection(client, daemon):
    values = {f"{t}/{i}": os.urandom(1000) for t in range(8) for i in range(20)}
    failures: list[object] = []

    def work(t: int) -> None:
        keys = [key for key in values if key.startswith(f"{t}/")]
        for _ in range(10):
            puts = client.ll_batch_put([LLPutItem(key, values[key]) for key in keys])
            got = client.ll_batch_get_items([LLGetItemOpt(key) for key in keys])
            if any(r.status for r in puts) or [r.data for r in got] != [values[key] for key in keys]:
                failures.append((t, puts, [r.status for r in got]))
            client.ll_batch_query(keys)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert daemon.count()["Hello"] == 1
    assert not daemon.reserved


def test_descriptors_are_bounded_over_all_threads(daemon, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
    with KvcsLowLevelClient(daemon.path) as client:
        keys = [f"k{i}" for i in range(25)]
        assert put(client, *keys) == [0] * 25
        assert get(client, *keys) == [len(key) for key in keys]
        hello = daemon.wait_for(wire.Hello)[0]
        assert hello.max_fds == 10
        assert max(len(r.keys) for r in daemon.seen if isinstance(r, wire.Open | wire.Reserve)) == 10


def test_a_reply_whose_descriptors_do_not_fit_is_asked_for_in_halves(client, daemon):
    keys = [f"k{i}" for i in range(16)]
    assert put(client, *keys) == [0] * 16
    pid = os.fork()
    if pid == 0:  # a process of its own, since the limit is the process's
        child = KvcsLowLevelClient(daemon.path)
        child.ll_batch_query(["connect"])
        free = os.dup(
            0
        )  # the lowest number that is free; so are those above it that the parent's fixtures don't use
        os.close(free)
        os.closerange(free, free + 100)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 10, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        os._exit(0 if get(child, *keys) == [len(key) for key in keys] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    asked = [len(r.keys) for r in daemon.wait_for(wire.Open)]
    assert asked == [16, 8, 8]
    assert len(daemon.wait_for(wire.Release, 3)) == 3


def test_a_forked_child_is_told_and_leaves_the_parent_alone(client, daemon):
    assert put(client, "a") == [0]
    link = client._core.channel._link
    assert link is not None
    pid = os.fork()
    if pid == 0:
        try:
            client.ll_batch_query(["a"])
        except KvcsClosedError as exc:
            client.close()
            os._exit(0 if "fork" in str(exc) and link.connection._sock.fileno() == -1 else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert get(client, "a") == [1]
    assert daemon.count()["Hello"] == 1


def test_nothing_stays_open_after_thousands_of_batches(daemon):
    with KvcsLowLevelClient(daemon.path) as client:
        assert put(client, "a", "b") == [0, 0]
        get(client, "a")
        fds = open_fds()
        for _ in range(1000):
            assert get(client, "a", "none", "b") == [1, 0, 1]
            assert (
                client.ll_batch_get_into_items([LLGetItemOpt("a")], [bytearray(0)])[0].status == -errno.ENOSPC
            )
        for _ in range(100):
            assert put(client, "a", "b") == [0, 0]
        assert open_fds() < fds + 10  # not one a batch; other tests may still be closing theirs
        workers = [thread.name for thread in threading.enumerate() if thread.name.startswith("kvcs-")]
        assert workers.count("kvcs-get") <= 4
        assert workers.count("kvcs-set") <= 4


def test_a_client_that_is_dropped_closes_its_connection(daemon):
    client = KvcsLowLevelClient(daemon.path)
    put(client, "a")
    threads = {t for t in threading.enumerate() if t.name.startswith("kvcs-")}
    assert threads
    link = client._core.channel._link
    assert link is not None
    sock = link.connection._sock
    del client
    gc.collect()
    assert sock.fileno() == -1
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def test_a_call_under_way_ends_when_another_thread_closes(client, daemon):
    daemon.silent = {wire.Query}
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            client.ll_batch_query(["a"])
        except KvcsClosedError as exc:
            caught.append(exc)

    thread = threading.Thread(target=ask)
    thread.start()
    daemon.wait_for(wire.Query)
    client.close()
    thread.join(5)
    assert len(caught) == 1


def test_closing_descriptors():
    fds = [os.dup(0) for _ in range(5)]
    other = os.dup(0)
    close_fds(fds)
    close_fds([])
    os.fstat(other)
    os.close(other)
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
