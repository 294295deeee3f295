"""The lines of the SDK contract's table that the SDK decides, or carries from the daemon."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvcsfs import wire
from kvcsfs.errors import KvcsClosedError, KvcsCode, KvcsError, KvcsTimeoutError, KvcsUnavailableError
from kvcsfs.sdk import KvcsLowLevelClient, LLBatchOptions, LLGetItemOpt, LLPutItem
from tests.sdk.fake_daemon import FakeDaemon

KIB = 1024
EMPTY, NUL, LONG, SURROGATE = "", "a\0b", "k" * 257, "\ud800"


def get_into(client: KvcsLowLevelClient, keys: list[str], size: int = 8, **options: object) -> list[int]:
    buffers = [bytearray(size) for _ in keys]
    return [r.status for r in client.ll_batch_get_into_items([LLGetItemOpt(k) for k in keys], buffers)]


def get(client: KvcsLowLevelClient, *keys: str) -> list[int]:
    return [r.status for r in client.ll_batch_get_items([LLGetItemOpt(k) for k in keys])]


def put(client: KvcsLowLevelClient, *pairs: tuple[str, Any], opts: LLBatchOptions | None = None) -> list[int]:
    return [r.status for r in client.ll_batch_put([LLPutItem(k, v) for k, v in pairs], opts=opts)]


def test_what_was_put_is_read_back_by_each_call(client, daemon):
    values = {"small": b"s", "bytes": os.urandom(100 * KIB), "large": os.urandom(700 * KIB)}
    assert put(client, *values.items()) == [0, 0, 0]
    assert {key: daemon.value(key) for key in values} == values
    items = [LLGetItemOpt(key) for key in values]
    got = client.ll_batch_get_items(items)
    assert [(r.status, r.data, r.key, r.size) for r in got] == [
        (len(v), v, k, len(v)) for k, v in values.items()
    ]
    assert all(type(r.data) is bytearray for r in got)
    buffers = [bytearray(1 << 20) for _ in values]
    into = client.ll_batch_get_into_items(items, buffers)
    assert [(r.status, r.size, r.key) for r in into] == [(len(v), len(v), k) for k, v in values.items()]
    assert [b[: len(v)] for b, v in zip(buffers, values.values(), strict=True)] == list(values.values())
    assert not any(any(b[len(v) :]) for b, v in zip(buffers, values.values(), strict=True))
    queried = client.ll_batch_query(["large", "none"])
    assert [(r.key, r.status, r.total_size, r.total_shard, r.exists) for r in queried] == [
        ("large", "ok", 700 * KIB, 1, True),
        ("none", "not_found", 0, 1, False),
    ]
    gone = client.ll_batch_delete(["small", "small"])
    assert [(r, r.status, r.key) for r in gone] == [(0, 0, "small"), (-errno.ENOENT, -errno.ENOENT, "small")]


def test_an_empty_batch_is_an_empty_list_without_a_daemon(tmp_path):
    with KvcsLowLevelClient(tmp_path / "none") as client:
        assert client.ll_batch_query([]) == []
        assert client.ll_batch_get_items([]) == []
        assert client.ll_batch_get_into_items([], []) == []
        assert client.ll_batch_put([]) == []
        assert client.ll_batch_delete([]) == []


def test_a_match_ends_at_the_first_key_that_is_absent(client):
    put(client, ("a", b"a"), ("b", b"b"), ("d", b"d"))
    matched = [client.ll_batch_match(list(keys)) for keys in ("", "abcd", "dba", "cab", "ab", "aab")]
    assert matched == [0, 2, 3, 0, 2, 3]
    assert client.ll_batch_match(["a", EMPTY, "b"]) == 1


def test_absent_keys_miss(client):
    assert get(client, "a") == get_into(client, ["a"]) == [0]
    assert client.ll_batch_get_items([LLGetItemOpt("a")])[0].data is None


def test_bad_keys_are_answered_alone(client, daemon):
    daemon.store("good", b"12345678")
    keys = [EMPTY, NUL, "good", LONG, SURROGATE]
    wanted = [-errno.EINVAL, -errno.EINVAL, 8, -errno.ENAMETOOLONG, -errno.EINVAL]
    assert get(client, *keys) == get_into(client, keys) == wanted
    statuses = [r.status for r in client.ll_batch_query(keys)]
    assert statuses == ["invalid_argument", "invalid_argument", "ok", "invalid_argument", "invalid_argument"]
    wanted[2] = 0
    assert put(client, *((key, b"v") for key in keys)) == wanted
    assert client.ll_batch_delete(keys) == wanted
    assert all(
        request.keys == ["good"] for request in daemon.seen if isinstance(request, wire.Open | wire.Delete)
    )


def test_a_key_is_measured_in_bytes(client):
    assert put(client, ("é" * 128, b"v"), ("é" * 129, b"v")) == [0, -errno.ENAMETOOLONG]


def test_values_empty_or_over_the_limit(daemon):
    daemon.store("large", bytes(11))
    with KvcsLowLevelClient(daemon.path, max_value_size=10) as client:
        pairs = [("a", b""), ("b", bytes(11)), ("c", bytes(10)), ("d", [b"", b""])]
        assert put(client, *pairs) == [-errno.EINVAL, -errno.E2BIG, 0, -errno.EINVAL]
        for result in (
            client.ll_batch_get_items([LLGetItemOpt("large"), LLGetItemOpt("c")]),
            client.ll_batch_get_into_items(
                [LLGetItemOpt("large"), LLGetItemOpt("c")], [bytearray(20), bytearray(20)]
            ),
        ):
            assert [(r.status, r.size) for r in result] == [(-errno.E2BIG, 11), (10, 10)]


def test_a_buffer_too_small_stays_untouched_and_learns_the_size(client, daemon):
    daemon.store("a", b"12345678")
    daemon.store("b", b"abc")
    buffers = [bytearray(7), bytearray(3)]
    results = client.ll_batch_get_into_items([LLGetItemOpt("a"), LLGetItemOpt("b")], buffers)
    assert [(r.status, r.size) for r in results] == [(-errno.ENOSPC, 8), (3, 3)]
    assert buffers == [bytes(7), b"abc"]


def test_statuses_of_the_daemon_are_carried(client, daemon):
    daemon.statuses = {"full": -errno.ENOSPC, "busy": -errno.EBUSY, "bad": -errno.EIO}
    assert put(client, ("full", b"v"), ("ok", b"v"), ("busy", b"v")) == [-errno.ENOSPC, 0, -errno.EBUSY]
    assert get(client, "bad", "ok") == [-errno.EIO, 1]
    assert [r.status for r in client.ll_batch_query(["bad"])] == ["unavailable"]


def test_an_unknown_mountpoint(tmp_path):
    daemon = FakeDaemon(tmp_path, backend="pooled")
    opts = LLBatchOptions(mountpoint_index=3)
    with KvcsLowLevelClient(daemon.path) as client:
        keys = ["a", "b"]
        assert put(client, ("a", b"v"), ("b", b"v"), opts=opts) == [-errno.ENODEV] * 2
        got = client.ll_batch_get_items([LLGetItemOpt(key) for key in keys], opts=opts)
        assert [r.status for r in got] == [-errno.ENODEV] * 2
        assert client.ll_batch_delete(keys, opts=opts) == [-errno.ENODEV] * 2
        assert [r.status for r in client.ll_batch_query(keys, opts=opts)] == ["unavailable"] * 2
        assert put(client, ("a", b"v")) == [0]
    daemon.stop()


def test_the_mountpoint_is_ignored_by_the_direct_backend(client):
    assert put(client, ("a", b"v"), opts=LLBatchOptions(mountpoint_index=7)) == [0]


def test_if_exists(client, daemon):
    daemon.store("a", b"old")
    assert put(client, ("a", b"new"), ("b", b"new"), opts=LLBatchOptions(if_exists="keep")) == [0, 0]
    assert put(client, ("a", b"new"), opts=LLBatchOptions(if_exists="error")) == [-errno.EEXIST]
    assert daemon.value("a") == b"old"
    assert put(client, ("a", b"new")) == [0]
    assert daemon.value("a") == b"new"


def test_of_duplicate_keys_in_a_put_the_last_wins(client, daemon):
    assert put(client, ("a", b"1"), ("b", b"2"), ("a", b"3")) == [0, 0, 0]
    assert (daemon.value("a"), daemon.value("b")) == (b"3", b"2")
    assert daemon.wait_for(wire.Reserve)[0].keys == ["b", "a"]
    daemon.statuses = {"a": -errno.ENOSPC}
    assert put(client, ("a", b"1"), ("b", b"2"), ("a", b"3")) == [-errno.ENOSPC, 0, -errno.ENOSPC]


def test_duplicate_keys_in_a_get_fill_each_buffer(client, daemon):
    daemon.store("a", b"12345678")
    buffers = [bytearray(8), bytearray(8)]
    assert [r.status for r in client.ll_batch_get_into_items([LLGetItemOpt("a")] * 2, buffers)] == [8, 8]
    assert buffers == [b"12345678"] * 2


def test_renew_is_on_for_get_and_off_for_query(client, daemon):
    for renew, opts in (
        (None, None),
        (True, LLBatchOptions(renew=True)),
        (False, LLBatchOptions(renew=False)),
    ):
        daemon.seen.clear()
        client.ll_batch_query(["a"], opts=opts)
        client.ll_batch_get_items([LLGetItemOpt("a")], opts=opts)
        assert daemon.wait_for(wire.Query)[0].renew is bool(renew)
        assert daemon.wait_for(wire.Open)[0].renew is (renew is not False)


def test_large_batches_are_split_and_stay_in_order(daemon):
    with KvcsLowLevelClient(daemon.path, max_keys_per_batch=3) as client:
        values = {f"k{i}": bytes([i]) * (i + 1) for i in range(10)}
        assert put(client, *values.items()) == [0] * 10
        keys = [*values, "none"]
        assert get(client, *keys) == get_into(client, keys, 16) == [*range(1, 11), 0]
        assert [r.total_size for r in client.ll_batch_query(keys)] == [*range(1, 11), 0]
        assert client.ll_batch_delete(keys) == [0] * 10 + [-errno.ENOENT]
        counts = daemon.count()
        assert (counts["Reserve"], counts["Open"], counts["Query"], counts["Delete"]) == (4, 8, 4, 4)
        assert max(len(r.keys) for r in daemon.seen if isinstance(r, wire.Open)) == 3


def test_the_daemons_own_limit_of_keys_is_kept(client, daemon):
    daemon.max_keys = 2
    assert get(client, *"abcde") == [0] * 5
    assert daemon.count()["Open"] == 3


def test_puts_are_cut_to_a_quarter_of_the_capacity(tmp_path):
    daemon = FakeDaemon(tmp_path, capacity=128 * KIB)  # 32 KiB: three values of 4 KiB and their footers
    with KvcsLowLevelClient(daemon.path) as client:
        pairs = [(f"k{i}", bytes(4 * KIB)) for i in range(7)] + [("large", bytes(60 * KIB))]
        assert put(client, *pairs) == [0] * 8
        reserves = daemon.wait_for(wire.Reserve, 3)
        assert [r.keys for r in reserves] == [["k0", "k1", "k2", "k3"], ["k4", "k5", "k6"], ["large"]]
    daemon.stop()


@pytest.mark.parametrize("parts", [[64], [33, 32], [100, 100], [100, 100, 100]])
def test_a_long_put_goes_in_parts(daemon, client, parts):
    pairs = [(f"k{i}", b"%d" % i) for i in range(sum(parts))]
    assert put(client, *pairs) == [0] * len(pairs)
    reserves = daemon.wait_for(wire.Reserve, len(parts))
    assert [len(r.keys) for r in reserves] == parts
    assert {key for r in reserves for key in r.keys} == {key for key, _ in pairs}
    assert all(daemon.value(key) == value for key, value in pairs)


def test_a_put_larger_than_its_share_goes_in_equal_parts(tmp_path):
    daemon = FakeDaemon(tmp_path, capacity=4 * 600 * KIB)
    with KvcsLowLevelClient(daemon.path) as client:
        assert put(client, *((f"k{i}", bytes(4 * KIB)) for i in range(100))) == [0] * 100
        assert [len(r.keys) for r in daemon.wait_for(wire.Reserve, 3)] == [34, 34, 32]
    daemon.stop()


def test_puts_that_share_a_client_never_wait_for_each_other_at_once(tmp_path):
    """Each has several parts under way: what one holds must not wait for what the other does."""
    daemon = FakeDaemon(tmp_path, capacity=4 * 600 * KIB)
    with KvcsLowLevelClient(daemon.path) as client, ThreadPoolExecutor(4) as pool:
        batches = [[(f"{i}/{j}", bytes(4 * KIB)) for j in range(200)] for i in range(12)]
        for statuses in pool.map(lambda pairs: put(client, *pairs), batches):
            assert statuses == [0] * 200
    daemon.stop()


def test_a_part_that_fails_as_a_whole_ends_the_others(daemon, client):
    daemon.dies_on = {wire.Commit}
    assert set(put(client, *[(f"k{i}", b"x") for i in range(1000)])) == {-errno.ENOTCONN}
    assert len(daemon.wait_for(wire.Reserve, 1)) < 8, "none began after the connection had died"


def test_no_daemon(tmp_path):
    with KvcsLowLevelClient(tmp_path / "none") as client:
        for call in (
            lambda: get(client, "a"),
            lambda: get_into(client, ["a"]),
            lambda: client.ll_batch_query(["a"]),
        ):
            with pytest.raises(KvcsUnavailableError, match="no daemon at") as failure:
                call()
            assert isinstance(failure.value, ConnectionError)
            error = failure.value
            assert (error.code, error.errno) == (KvcsCode.UNAVAILABLE, errno.ENOTCONN)
            assert str(error) == f"{error.op}: {error.message}"
            assert error.op in {"get", "exists"}
        assert put(client, ("a", b"v"), ("", b"v")) == [-errno.ENOTCONN, -errno.EINVAL]
        assert client.ll_batch_delete(["a"]) == [-errno.ENOTCONN]


def test_a_closed_client_says_so(client):
    client.close()
    client.close()
    for call in (
        lambda: get(client, "a"), lambda: get_into(client, ["a"]), lambda: put(client, ("a", b"v")),
        lambda: client.ll_batch_query(["a"]), lambda: client.ll_batch_delete(["a"]),
    ):  # fmt: skip
        with pytest.raises(KvcsClosedError):
            call()


@pytest.mark.parametrize("seconds", [-1, float("nan"), -float("inf")])
def test_a_deadline_must_make_sense(client, seconds):
    with pytest.raises(ValueError, match="deadline_s"):
        client.ll_batch_query(["a"], seconds)


@pytest.mark.parametrize("seconds", [0, float("inf"), 10, 0.5])
def test_deadlines_that_do(client, seconds):
    assert client.ll_batch_query(["a"], seconds)[0].status == "not_found"


WRONG: Any = {"key": None, "value": "text", "segment": 3, "index": "0", "path": 3, "count": 1.5, "renew": 0}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.ll_batch_query("abc"), "sequence of str"),
        (lambda c: c.ll_batch_query([1]), "a key must be a str, not int"),
        (lambda c: c.ll_batch_get_items(["a"]), "LLGetItemOpt"),
        (lambda c: c.ll_batch_get_items([LLGetItemOpt(WRONG["key"])]), "a key must be a str, not NoneType"),
        (lambda c: c.ll_batch_put([LLPutItem("a", WRONG["value"])]), "buffer of bytes, not str"),
        (lambda c: c.ll_batch_put([LLPutItem("a", [b"x", WRONG["segment"]])]), "buffer of bytes, not int"),
        (lambda c: c.ll_batch_get_into_items([LLGetItemOpt("a")], [3]), "buffer of bytes, not int"),
        (lambda c: c.ll_batch_query(["a"], "1"), "seconds, not str"),
        (lambda c: c.ll_batch_query(["a"], opts={}), "LLBatchOptions"),
        (lambda c: LLBatchOptions(mountpoint_index=WRONG["index"]), "mountpoint_index"),
        (lambda c: LLBatchOptions(mountpoint_index=True), "mountpoint_index must be an int, not bool"),
        (lambda c: LLBatchOptions(renew=WRONG["renew"]), "renew must be True, False or None, not int"),
        (lambda c: KvcsLowLevelClient(WRONG["path"]), "path"),
        (lambda c: KvcsLowLevelClient("s", log_path=WRONG["path"]), "log_path must be a path, not int"),
        (lambda c: KvcsLowLevelClient("s", get_workers=WRONG["count"]), "get_workers must be an int"),
    ],
)
def test_wrong_types(client, call, message):
    with pytest.raises(TypeError, match=message):
        call(client)


@pytest.mark.parametrize(
    "arguments",
    [
        {"efc_socket": ""}, {"efc_socket": "x" * 108}, {"max_value_size": -1}, {"max_value_size": (4 << 30) + 1},
        {"max_key_size": 1025}, {"max_keys_per_batch": -1}, {"get_workers": -1}, {"default_deadline_s": -1},
        {"perf_report_interval_sec": float("nan")},
    ],
)  # fmt: skip
def test_limits_out_of_range(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))) as failure:
        KvcsLowLevelClient(**({"efc_socket": "s"} | arguments))
    assert not isinstance(failure.value, KvcsError)


def test_an_unknown_if_exists():
    with pytest.raises(ValueError, match="overwrite, keep, error"):
        LLBatchOptions(if_exists=WRONG["value"])


def test_the_sockets_path_comes_from_the_environment(daemon, monkeypatch):
    monkeypatch.setenv("KVCS_SOCKET", daemon.path)
    with KvcsLowLevelClient() as client:
        assert client.ll_batch_query(["a"])[0].status == "not_found"


def test_the_timeout_is_a_timeout_error():
    assert issubclass(KvcsTimeoutError, TimeoutError)
    assert not issubclass(KvcsError, ValueError)


class Seconds(float):
    """As numpy's float64, which stays one in sums, and which the wire's encoder refuses."""

    def __radd__(self, other: float) -> Seconds:
        return Seconds(other + float(self))

    def __sub__(self, other: float) -> Seconds:
        return Seconds(float(self) - other)


@pytest.mark.parametrize("seconds", [Seconds(5), 10**400, 1e300])
def test_any_number_of_seconds_is_a_deadline(client, seconds):
    assert client.ll_batch_put([LLPutItem("a", b"v")], seconds)[0].status == 0
    assert client.ll_batch_get_items([LLGetItemOpt("a")], seconds)[0].data == b"v"


def test_items_may_come_one_by_one(client):
    assert [r.status for r in client.ll_batch_put(LLPutItem(k, b"v") for k in "abc")] == [0, 0, 0]
    assert [r.status for r in client.ll_batch_get_items(LLGetItemOpt(k) for k in "abc")] == [1, 1, 1]
