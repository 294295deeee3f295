"""The HiCache backend with small stand-ins for SGLang's host pools, on a real daemon."""

from __future__ import annotations

import os
import random
import threading
from typing import Any

import pytest

from kvcs import KvcsLowLevelClient
from tests.connectors.fakes.sglang import (
    SGLANG,
    HiCacheStorageConfig,
    HostPool,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from tests.connectors.fakes.torch import BFLOAT16, Tensor
from tests.engines.daemon import Daemon

CONNECTOR = ("sglang", SGLANG)
KEYS = [f"{i:064x}" for i in range(8)]


def backend(module: Any, socket: str, pool: Any = None, zero_copy: int = 1, **changes: Any) -> Any:
    config = HiCacheStorageConfig(extra_config={"interface_v1": zero_copy, "kvcs.socket": socket}, **changes)
    made = module.KvcsHiCache(config, {})
    if pool is not None:
        made.register_mem_pool_host(pool)
    return made


def filled(pages: int = 16, **shape: Any) -> HostPool:
    pool = HostPool(pages, **shape)
    pool.memory[:] = os.urandom(len(pool.memory))
    return pool


@pytest.mark.parametrize(
    ("layout", "buffers"),
    [("page_first", 2), ("page_first_direct", 2), ("layer_first", 160), ("page_first", 1)],
)
def test_pages_come_back_to_the_byte_into_other_places_of_the_pool(module, daemon, layout, buffers):
    pool = filled(layout=layout, buffers=buffers)
    storage = backend(module, daemon.socket, pool)
    assert storage.batch_set_v1(KEYS[:4], pool.indices(0, 1, 2, 3)) == [True] * 4
    assert (storage.batch_exists(KEYS), storage.exists(KEYS[3]), storage.exists(KEYS[4])) == (4, True, False)
    assert storage.batch_get_v1(KEYS[:5], pool.indices(9, 8, 11, 10, 12)) == [True] * 4 + [False]
    assert [pool.page(i) for i in (9, 8, 11, 10)] == [pool.page(i) for i in range(4)]
    storage.close()


def test_a_page_is_one_value(module, daemon):
    pool = filled()
    storage = backend(module, daemon.socket, pool, tp_rank=1, tp_size=2)
    storage.batch_set_v1(KEYS[:1], pool.indices(5))
    key = f"org~2fmodel/v1/sglang/bfloat16/page_first.page4/tp1of2/{KEYS[0]}"
    with KvcsLowLevelClient(daemon.socket) as client:
        assert client.ll_batch_query([key])[0].total_size == len(pool.page(5)) == 512
    storage.close()


def test_ranks_layouts_and_models_share_nothing(module, daemon):
    pool = filled()
    storages = [
        backend(module, daemon.socket, pool),
        backend(module, daemon.socket, pool, tp_rank=1, tp_size=2),
        backend(module, daemon.socket, pool, pp_rank=1, pp_size=2),
        backend(module, daemon.socket, pool, attn_cp_rank=1, attn_cp_size=2),
        backend(module, daemon.socket, pool, model_name="org-model"),
        backend(module, daemon.socket, filled(layout="layer_first")),
        backend(module, daemon.socket, filled(page_size=8)),
        backend(module, daemon.socket, pool, zero_copy=0),
    ]
    for storage in storages:
        assert storage.batch_exists(KEYS[:1]) == 0
        tensor = Tensor((256,), BFLOAT16)
        stored = storage.batch_set(KEYS[:1], [tensor]) if storage is storages[-1] else None
        if stored is None:
            (stored,) = storage.batch_set_v1(KEYS[:1], storage.mem_pool_host.indices(0))
        assert stored
        assert storage.batch_exists(KEYS[:1]) == 1
    for storage in storages:
        storage.close()


def test_of_a_replicated_model_one_rank_writes_and_all_read(module, daemon):
    pool = filled(buffers=1)
    first, second = (
        backend(module, daemon.socket, pool, is_mla_model=True, tp_rank=rank, tp_size=2) for rank in range(2)
    )
    assert second.batch_set_v1(KEYS[:1], pool.indices(0)) == [True]
    assert second.batch_exists(KEYS[:1]) == 0
    first.batch_set_v1(KEYS[:1], pool.indices(0))
    assert second.batch_get_v1(KEYS[:1], pool.indices(3)) == [True]
    assert pool.page(3) == pool.page(0)
    first.close()
    second.close()


def test_pools_of_a_replicated_model_that_are_split_have_keys_of_each_rank(module, daemon):
    class MHATokenToKVPoolHost(HostPool):
        pass

    storages = [
        backend(module, daemon.socket, filled(), is_mla_model=True, tp_rank=rank, tp_size=2)
        for rank in range(2)
    ]
    pools = {
        PoolName.MAMBA: filled(page_size=1),
        PoolName.DRAFT: MHATokenToKVPoolHost(4),
        PoolName.INDEXER: filled(),
    }
    for storage in storages:
        storage.registered_pools = pools
    for name, shared in ((PoolName.MAMBA, False), (PoolName.DRAFT, False), (PoolName.INDEXER, True)):
        transfer = PoolTransfer(name, pools[name].indices(0), KEYS[:1])
        assert storages[0].batch_set_v2([transfer]) == {name: [True]}
        assert storages[1].batch_get_v2([transfer]) == {name: [shared]}
    for storage in storages:
        storage.close()


def test_a_hybrid_model_restores_what_all_its_pools_have(module, daemon):
    pool, state = filled(), filled(page_size=1, buffers=3)
    storage = backend(module, daemon.socket, pool)
    storage.registered_pools = {PoolName.MAMBA: state, PoolName.INDEXER: pool}
    storage.batch_set_v1(KEYS[:6], pool.indices(*range(6)))
    assert storage.batch_set_v2([PoolTransfer(PoolName.MAMBA, [2, 4], [KEYS[1], KEYS[3]])]) == {
        "mamba": [True] * 2
    }
    storage.batch_set_v2([PoolTransfer(PoolName.INDEXER, pool.indices(*range(5)), KEYS[:5])])
    every = PoolTransfer(PoolName.INDEXER)
    last = PoolTransfer(PoolName.MAMBA, keys=KEYS[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)

    def answer(*transfers: PoolTransfer, keys: list[str] = KEYS) -> tuple[Any, ...]:
        result = storage.batch_exists_v2(keys, list(transfers))
        return result.kv_hit_pages, result.extra_pool_hit_pages, result.restorable_prefix_pages

    assert answer() == (6, {"kv": 6}, [1, 2, 3, 4, 5, 6])
    assert answer(every) == (5, {"kv": 6, "indexer": 5}, [1, 2, 3, 4, 5])
    assert answer(every, last) == (4, {"kv": 6, "indexer": 5, "mamba": 4}, [2, 4])
    last.keys = KEYS[:2]
    assert answer(last) == (0, {"kv": 6}, [])
    assert answer(every, keys=KEYS[6:]) == (0, {}, [])
    groups = PoolTransfer(
        PoolName.INDEXER, keys=KEYS[:6], hit_policy=PoolHitPolicy.BLOCK_GROUPS, block_pages=3, group_pages=2
    )
    assert answer(groups) == (
        6,
        {"kv": 6, "indexer": 6},
        [1, 2, 3, 4, 5, 6],
    )  # two whole groups of three pages
    assert storage.batch_get_v2([PoolTransfer(PoolName.MAMBA, [7, 8], [KEYS[3], KEYS[2]])]) == {
        "mamba": [True, False]
    }
    assert state.page(7) == state.page(4)
    storage.close()


def test_the_generic_calls_move_tensors(module, daemon):
    storage = backend(module, daemon.socket, HostPool(4), zero_copy=0)
    tensors = [Tensor((64,), BFLOAT16, os.urandom(128)) for _ in range(3)]
    assert storage.batch_set(KEYS[:2], tensors[:2])
    assert storage.set(KEYS[2], tensors[2])
    out = [Tensor((64,), BFLOAT16) for _ in range(4)]
    got = storage.batch_get(KEYS[:4], out)
    assert got[:3] == out[:3]
    assert got[3] is None
    assert [t.memory for t in out[:3]] == [t.memory for t in tensors]
    assert storage.get(KEYS[0], Tensor((65,), BFLOAT16)) is None  # another size
    assert storage.get(KEYS[0]) is None
    assert storage.batch_exists(KEYS) == 3
    storage.close()


def test_clear_deletes_what_this_model_has(module, daemon):
    pool = filled()
    storages = [
        backend(module, daemon.socket, pool, **changes)
        for changes in ({}, {"tp_rank": 1, "tp_size": 2}, {"model_name": "x"})
    ]
    for storage in storages:
        storage.batch_set_v1(KEYS[:2], pool.indices(0, 1))
    assert storages[0].clear()
    assert [storage.batch_exists(KEYS) for storage in storages] == [0, 0, 2]
    for storage in storages:
        storage.close()


def test_metrics_tell_of_each_batch_once(module, daemon):
    pool = filled()
    assert backend(module, daemon.socket, pool).get_stats() is None
    storage = backend(module, daemon.socket, pool, enable_storage_metrics=True)
    storage.batch_set_v1(KEYS[:3], pool.indices(0, 1, 2))
    storage.batch_get_v1(KEYS[2:4], pool.indices(5, 6))
    stats = storage.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [1])
    assert all(speed > 0 for speed in stats.backup_bandwidth + stats.prefetch_bandwidth)
    assert storage.get_stats().prefetch_pgs == []
    storage.close()


def test_what_a_pool_gets_wrong_is_a_miss(module, daemon, monkeypatch):
    pool = filled()
    storage = backend(module, daemon.socket, pool)
    assert storage.batch_set_v1(KEYS[:2], pool.indices(0)) == [False, False]
    assert storage.batch_get_v2([PoolTransfer(PoolName.MAMBA, [1], KEYS[:1])]) == {"mamba": [False]}
    monkeypatch.setattr(pool, "get_page_buffer_meta", lambda indices: ([1, 2, 3], [1, 1, 1]))
    assert storage.batch_get_v1(KEYS[:2], pool.indices(0, 1)) == [False, False]
    assert storage.batch_get_v1([], []) == []
    storage.close()


def test_wrong_options_and_a_model_without_a_name_are_refused(module):
    with pytest.raises(ValueError, match=r"unknown option 'kvcs\.soket'"):
        module.KvcsHiCache(HiCacheStorageConfig(extra_config={"kvcs.soket": "/s"}), {})
    with pytest.raises(ValueError, match="the model has no name"):
        module.KvcsHiCache(HiCacheStorageConfig(model_name=None), {})


def test_eviction_all_the_time_gives_misses_and_no_wrong_byte(module, tmp_path):
    with Daemon(tmp_path, 1 << 20) as daemon:
        pool = filled(pages=64, size=8 << 10)
        storages = [backend(module, daemon.socket, pool, model_name=f"m{i}") for i in range(2)]
        known: dict[str, bytes] = {}
        counts = {True: 0, False: 0}
        chosen = random.Random(1)

        def work(storage: Any, first: int) -> None:
            for turn in range(40):
                pages = [first + i for i in range(8)]
                keys = [f"{first}-{turn}-{i}" for i in range(8)]
                for key, page in zip(keys, pages, strict=True):
                    known[key] = pool.page(page)
                storage.batch_set_v1(keys, pool.indices(*pages))
                asked = [f"{first}-{chosen.randint(max(0, turn - 12), turn)}-{i}" for i in range(8)]
                free = [first + 8 + i for i in range(8)]
                for key, page, hit in zip(
                    asked, free, storage.batch_get_v1(asked, pool.indices(*free)), strict=True
                ):
                    counts[hit] += 1
                    assert not hit or pool.page(page) == known[key]

        failed: list[BaseException] = []

        def run(storage: Any, first: int) -> None:
            try:
                work(storage, first)
            except BaseException as exc:  # noqa: BLE001  # looked at below
                failed.append(exc)

        threads = [threading.Thread(target=run, args=(storages[i % 2], 16 * i)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert min(counts.values()) > 20
        for storage in storages:
            storage.close()


def test_a_daemon_killed_in_the_middle_is_misses_until_it_is_back(module, daemon):
    pool = filled()
    storage = backend(module, daemon.socket, pool)
    storage.batch_set_v1(KEYS[:4], pool.indices(0, 1, 2, 3))
    daemon.kill()
    assert storage.batch_exists(KEYS) == 0
    assert storage.batch_exists_v2(KEYS).kv_hit_pages == 0
    assert storage.batch_get_v1(KEYS[:4], pool.indices(8, 9, 10, 11)) == [False] * 4
    assert storage.batch_set_v1(KEYS[4:6], pool.indices(4, 5)) == [False] * 2
    assert not storage.clear()
    daemon.start()
    assert storage.batch_exists(KEYS) == 4
    assert storage.batch_get_v1(KEYS[:4], pool.indices(8, 9, 10, 11)) == [True] * 4
    assert [pool.page(i + 8) for i in range(4)] == [pool.page(i) for i in range(4)]
    storage.close()
    storage.close()
    assert storage.batch_exists(KEYS) == 0
