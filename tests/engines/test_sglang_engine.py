# ruff: noqa: E402, I001  # what is imported when depends on what is there
"""The HiCache backend in the real SGLang: its own loader, and its real host pools on the CPU, in all layouts."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.engines.daemon import Daemon

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from tests.engines import without_torchvision  # noqa: F401  # before anything of SGLang's is imported
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

pytestmark = pytest.mark.engines

LAYERS, HEADS, DIMENSION, PAGE, TOKENS = 4, 2, 64, 16, 128
LAYOUTS = ["page_first", "page_first_direct", "layer_first"]
KEYS = [f"{i:064x}" for i in range(6)]


def host_pool(layout: str, dtype: Any = torch.bfloat16) -> Any:
    pool = host_pool_of(layout, dtype, LAYERS, HEADS, DIMENSION, PAGE, 2 * TOKENS)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape).to(dtype))
    return pool


def host_pool_of(
    layout: str, dtype: Any, layers: int, heads: int, dimension: int, page: int, tokens: int
) -> Any:
    """A host pool as SGLang makes one, for twice the tokens of a device pool that is on the CPU as well."""
    device = tokens // 2
    keys, values = (
        tuple(torch.zeros(device, heads, dimension, dtype=dtype) for _ in range(layers)) for _ in "kv"
    )

    def pointers(tensors: Any) -> Any:
        return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)

    buffers = KVBuffers(
        k=keys, v=values, k_data_ptrs=pointers(keys), v_data_ptrs=pointers(values), layout=KVBufferLayout.NHD
    )
    info = MHABufferInfo(
        buffers=buffers, page_size=page, head_num=heads, head_dim=dimension, v_head_dim=dimension, dtype=dtype,
        device=torch.device("cpu"),
    )  # fmt: skip
    return MHATokenToKVPoolHost(
        info,
        2.0,
        0,
        page,
        layout,
        pin_memory=False,
        device_capacity_tokens=device,
        start_layer=0,
        end_layer=layers,
    )


def config(layout: str, extra: dict[str, Any]) -> Any:
    return HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False, enable_storage_metrics=True, is_page_first_layout=layout != "layer_first",
        model_name="org/model", extra_config=extra,
    )  # fmt: skip


def attach(daemon: Daemon, pool: Any, layout: str, **options: Any) -> Any:
    """The backend as the cache controller makes it and tells it of the pools."""
    ours = {"socket": daemon.socket} | options
    extra = {
        "backend_name": "kvcs", "module_path": "kvcsfs.connectors.sglang", "class_name": "KvcsHiCache",
        "interface_v1": 1, **{f"kvcs.{name}": value for name, value in ours.items()},
    }  # fmt: skip
    storage = StorageBackendFactory.create_backend("dynamic", config(layout, extra), pool)
    storage.register_mem_pool_host(pool)
    storage.register_mem_host_pool_v2(pool, PoolName.KV)
    storage.on_host_pools_registered()
    return storage


def pages(pool: Any, indices: Any) -> list[Any]:
    return [pool.get_data_page(int(index)).clone() for index in indices[::PAGE]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_pages_of_the_real_host_pool_come_back_to_the_bit(daemon, layout, dtype):
    pool = host_pool(layout, dtype)
    storage = attach(daemon, pool, layout)
    indices = pool.alloc(4 * PAGE)
    before = pages(pool, indices)
    assert storage.batch_set_v1(KEYS[:4], indices) == [True] * 4
    assert storage.batch_exists(KEYS) == 4
    pool.kv_buffer.zero_()
    assert storage.batch_get_v1(KEYS[:4], indices) == [True] * 4
    assert all(torch.equal(a, b) for a, b in zip(before, pages(pool, indices), strict=True))
    elsewhere = pool.alloc(5 * PAGE)
    assert storage.batch_get_v1(KEYS[:5], elsewhere) == [True] * 4 + [False]
    assert all(torch.equal(a, b) for a, b in zip(before, pages(pool, elsewhere), strict=False))
    stats = storage.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([4], [4, 4])
    storage.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_generic_calls_move_flat_pages_as_the_file_backend(daemon, tmp_path, layout):
    pool = host_pool(layout)
    storage = attach(daemon, pool, layout)
    indices = pool.alloc(3 * PAGE)
    flat = [pool.get_data_page(int(index), flat=True) for index in indices[::PAGE]]
    files = HiCacheFile(config(layout, {"file_storage_path": str(tmp_path / "files")}))
    for backend in (storage, files):
        assert backend.batch_set(KEYS[:3], flat)
        got = backend.batch_get(KEYS[:4], [pool.get_dummy_flat_data_page() for _ in range(4)])
        assert got[3] is None
        assert all(torch.equal(a, b) for a, b in zip(got[:3], flat, strict=True))
    storage.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hybrid_calls_answer_as_the_file_backend_does(daemon, tmp_path, layout):
    pool, state = host_pool(layout), host_pool(layout)
    storage = attach(daemon, pool, layout)
    files = HiCacheFile(config(layout, {"file_storage_path": str(tmp_path / "files")}))
    files.register_mem_host_pool_v2(pool, PoolName.KV)
    indices = pool.alloc(6 * PAGE)
    last = PoolTransfer(PoolName.MAMBA, keys=KEYS[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    every = PoolTransfer(PoolName.INDEXER)
    answers = []
    for backend in (storage, files):
        for name in (PoolName.MAMBA, PoolName.INDEXER):
            backend.register_mem_host_pool_v2(state, name)
        done = backend.batch_set_v2(
            [
                PoolTransfer(PoolName.KV, indices[: 5 * PAGE], keys=KEYS[:5]),
                PoolTransfer(PoolName.MAMBA, indices[: 2 * PAGE], keys=[KEYS[1], KEYS[2]]),
                PoolTransfer(PoolName.INDEXER, indices[: 4 * PAGE], keys=KEYS[:4]),
            ]
        )
        assert all(all(results) for results in done.values())
        for transfers in ([], [every], [last], [every, last]):
            found = backend.batch_exists_v2(KEYS, transfers)
            answers.append((found.kv_hit_pages, found.extra_pool_hit_pages, found.restorable_prefix_pages))
        got = backend.batch_get_v2(
            [PoolTransfer(PoolName.MAMBA, indices[3 * PAGE : 5 * PAGE], keys=KEYS[2:4])]
        )
        answers.append((dict(got),))
    assert answers[:5] == answers[5:]
    assert answers[3][0] == 3
    storage.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eviction_and_a_killed_daemon_give_misses_and_no_wrong_byte(tmp_path, layout, monkeypatch):
    pool = host_pool(layout)
    written, read = pool.alloc(2 * PAGE), pool.alloc(4 * PAGE)
    known: dict[str, Any] = {}
    counts = {True: 0, False: 0}
    with Daemon(tmp_path, 1 << 20) as daemon:  # 56 pages of 16 KiB, less where they have 20
        storage = attach(daemon, pool, layout)
        failures: list[threading.ExceptHookArgs] = []
        monkeypatch.setattr(threading, "excepthook", failures.append)
        for turn in range(60):
            if turn == 40:
                daemon.kill()
            if turn == 45:
                daemon.start()
            down = 40 <= turn < 45
            keys = [f"{turn:062x}{i:02x}" for i in range(2)]
            pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape).to(pool.dtype))
            known |= dict(zip(keys, pages(pool, written), strict=True))
            assert storage.batch_set_v1(keys, written) == [not down] * 2
            asked = [*keys, *(f"{max(0, turn - 25):062x}{i:02x}" for i in range(2))]
            got = storage.batch_get_v1(asked, read)
            for key, hit, page in zip(asked, got, pages(pool, read), strict=True):
                counts[hit] += 1
                assert not (hit and down)
                assert not hit or torch.equal(page, known[key])
        assert not failures
        assert min(counts.values()) > 20
        assert storage.clear()
        assert storage.batch_exists(list(known)[-1:]) == 0
        storage.close()


def test_wrong_options_are_said_in_one_line(daemon):
    with pytest.raises(ValueError, match=r"unknown option 'kvcs\.soket', expected one of kvcs\.socket"):
        attach(daemon, host_pool("page_first"), "page_first", soket="/s")
