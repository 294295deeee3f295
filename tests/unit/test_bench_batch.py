"""The matrix: what each cell does to a store, what it reports, and that nothing is left behind."""

import errno
import functools
import threading
from typing import cast

import pytest

from kvcs import KvcsLowLevelClient, KvcsTimeoutError, KvcsUnavailableError
from kvcsfs.bench import batch
from kvcsfs.bench.batch import Cell, Matrix, matrix, production
from kvcsfs.bench.environment import Environment, Node
from kvcsfs.bench.errors import BenchError
from kvcsfs.errors import ConfigError
from tests.unit.bench_fake import FakeClient, FakeStore, Status, fake_client

SMALL = Environment(keys=32, value_size=64, warm_up_s=0.0, duration_s=0.01)


def run(environment, groups, store):
    return list(Matrix(environment, groups, lambda *_: fake_client(store)).run())


def test_each_op_is_measured_and_its_keys_are_gone():
    store = FakeStore()
    results = run(SMALL, matrix(SMALL, batch.OPS, [1, 2], [4, 8]), store)
    assert [(r.op, r.batch_size, r.workers) for r in results] == [
        (op, size, workers) for op in batch.OPS for size in (4, 8) for workers in (1, 2)
    ]
    for result in results:
        assert result.batches > 0
        assert result.keys_per_s > 0
        assert (result.mb_per_s > 0) == (result.op not in {"query", "delete"})
        assert 0 < result.p50_ms <= result.p90_ms <= result.p99_ms <= result.max_ms
        assert (result.misses, result.errors, result.error) == (0, 0, "")
        assert (result.read_share is None) == (result.op != "mixed")
    assert not store.values


def test_every_node_is_loaded_and_cleaned():
    stores = {"/a": FakeStore(), "/b": FakeStore()}
    environment = Environment(
        nodes=[Node(socket="/a"), Node(socket="/b")], keys=8, value_size=64, warm_up_s=0.0, duration_s=0.01
    )
    seen = set()
    for name, store in stores.items():
        store.on_call = functools.partial(lambda name, op: seen.add((name, op)), name)
    groups = matrix(environment, ["get", "delete"], [2], [4])

    def connect(_settings, socket, *_):
        return fake_client(stores[socket])

    results = list(Matrix(environment, groups, connect).run())
    assert [r.callers for r in results] == [4, 4]
    assert seen == {(name, op) for name in stores for op in ("query", "get", "put", "delete")}
    assert not any(store.values for store in stores.values())


def test_concurrency_sets_callers_apart_from_workers():
    environment = Environment(keys=8, value_size=64, warm_up_s=0.0, duration_s=0.01, concurrency=3)
    opened = []

    def connect(_settings, _socket, workers, largest):
        opened.append((workers, largest))
        return fake_client(store)

    store = FakeStore()
    (result,) = Matrix(environment, matrix(environment, ["get"], [2], [4]), connect).run()
    assert (result.workers, result.callers) == (2, 3)
    assert (2, 64) in opened


def test_an_interrupt_deletes_the_keys():
    store = FakeStore()
    calls = threading.Event()

    def interrupt(op):
        if op == "get":
            calls.set()
            raise KeyboardInterrupt

    store.on_call = interrupt
    with pytest.raises(KeyboardInterrupt):
        run(SMALL, matrix(SMALL, ["get"], [2], [4]), store)
    assert calls.is_set()
    assert not store.values


def test_leaving_between_two_cells_deletes_the_keys():
    store = FakeStore()
    results = Matrix(SMALL, matrix(SMALL, ["get", "put"], [1], [4]), lambda *_: fake_client(store)).run()
    next(results)
    assert len(store.values) == 32
    results.close()
    assert not store.values


def test_failing_calls_are_counted_not_raised():
    store = FakeStore()

    def fail(op):
        if op == "query":
            raise KvcsTimeoutError("the deadline passed")

    store.on_call = fail
    (result,) = run(SMALL, matrix(SMALL, ["query"], [1], [4]), store)
    assert result.errors == 4 * result.batches > 0
    assert result.error == "ETIMEDOUT"
    assert result.keys_per_s == 0


def test_evicted_keys_are_misses():
    store = FakeStore(room=16)
    (result,) = run(SMALL, matrix(SMALL, ["get"], [1], [32]), store)
    assert result.misses == 16 * result.batches


def test_a_store_that_takes_nothing_ends_the_run():
    store = FakeStore()
    store.put_status = -errno.ENOSPC
    with pytest.raises(BenchError, match="can't be stored: No space left on device"):
        run(SMALL, matrix(SMALL, ["get"], [1], [4]), store)


def test_keys_that_cannot_be_deleted_are_told():
    store = FakeStore()

    class Stuck(FakeClient):
        def ll_batch_delete(self, keys):
            return [Status(-errno.ENOTCONN, key) for key in keys]

    with pytest.raises(BenchError, match=r"32 keys such as kvcs-bench/.* are left: Transport endpoint"):
        list(
            Matrix(
                SMALL, matrix(SMALL, ["get"], [1], [4]), lambda *_: cast("KvcsLowLevelClient", Stuck(store))
            ).run()
        )


def test_buffers_beyond_the_limit_are_refused_before_anything_is_stored():
    environment = Environment(keys=32, value_size="1MiB", buffer_memory="32MiB")
    with pytest.raises(ConfigError, match=r"would take 64.0 MiB, more than buffer_memory, 32.0 MiB"):
        Matrix(environment, matrix(environment, ["get"], [1, 2], [32]))


def test_batches_beyond_the_keys_are_refused():
    with pytest.raises(ConfigError, match="larger than the number of keys, 32"):
        Matrix(SMALL, matrix(SMALL, ["get"], [1], [33]))


def test_the_production_preset_covers_sizes_ratios_and_loads():
    groups = production(Environment(), peak=8)
    assert [g.dataset.largest for g in groups] == list(batch.PRODUCTION_SIZES)
    for group in groups:
        assert {c.workers for c in group.cells} == {8, 12}
        assert {(c.op, c.read_share) for c in group.cells} == {
            ("get", 1.0), ("put", 0.0), ("mixed", 0.9), ("mixed", 0.5),
        }  # fmt: skip
        assert all(c.batch_size * group.dataset.largest <= batch.PRODUCTION_BATCH_BYTES for c in group.cells)
    assert production(Environment(), peak=5)[0].cells[1] == Cell("get", 8, 128, 1.0)
    Matrix(Environment(), groups)  # its buffers fit the default limit


def test_failing_keys_are_told_from_good_ones():
    store = FakeStore()

    class Half(FakeClient):
        def ll_batch_query(self, keys):
            return [
                Status(("ok", "unavailable", "not_found", "timeout")[i % 4], key)
                for i, key in enumerate(keys)
            ]

        def ll_batch_get_into_items(self, items, buffers):
            return [Status((10, 0, -errno.EIO, 10)[i % 4], item.key) for i, item in enumerate(items)]

    client = cast("KvcsLowLevelClient", Half(store))
    query, get = Matrix(SMALL, matrix(SMALL, ["query", "get"], [1], [4]), lambda *_: client).run()
    assert (query.misses, query.errors) == (query.batches, 2 * query.batches)
    assert (get.misses, get.errors, get.error) == (get.batches, get.batches, "EIO")
    assert get.mb_per_s * 1e6 * get.seconds == pytest.approx(20 * get.batches)


def test_a_daemon_that_is_not_there_ends_it_at_once():
    store = FakeStore()

    def gone(op):
        raise KvcsUnavailableError("no daemon answers")

    store.on_call = gone
    with pytest.raises(KvcsUnavailableError):
        run(SMALL, matrix(SMALL, ["get"], [1], [4]), store)


def test_calls_longer_than_warm_up_and_duration_are_measured():
    environment = Environment(keys=8, value_size=64, warm_up_s=1e-9, duration_s=1e-9)
    store = FakeStore()
    (result,) = run(environment, matrix(environment, ["put"], [3], [4]), store)
    assert result.batches >= 3
    assert result.keys_per_s > 0
