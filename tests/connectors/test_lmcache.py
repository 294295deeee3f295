"""LMCache's remote connector and storage plugin with small stand-ins for its memory, on a real daemon."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

from kvcs import KvcsLowLevelClient
from tests.connectors.fakes.lmcache import LMCACHE, CacheEngineKey, CpuBackend, MemoryFormat, MemoryObj
from tests.connectors.fakes.torch import BFLOAT16, FLOAT16
from tests.engines.daemon import Daemon

CONNECTOR = ("lmcache", LMCACHE)
SHAPE = [16, 256, 8]
FULL, PARTIAL = 16 * 256 * 8 * 2, 16 * 3 * 8 * 2
KEYS = [CacheEngineKey(i + 0xABC) for i in range(8)]


def config(socket: str, **options: Any) -> Any:
    return SimpleNamespace(extra_config={"kvcs.socket": socket, "save_chunk_meta": True} | options)


def remote(module: Any, socket: str, cpu: CpuBackend) -> Any:
    return module.KvcsConnector(loop=None, local_cpu_backend=cpu, config=config(socket))


def plugin(module: Any, socket: str, cpu: CpuBackend, **options: Any) -> Any:
    return module.KvcsBackend(
        config=config(socket, **options),
        dst_device="cpu",
        metadata=cpu.metadata,
        local_cpu_backend=cpu,
        loop=None,
    )


def chunk(shape: list[int] = SHAPE, dtype: Any = BFLOAT16) -> MemoryObj:
    memory = MemoryObj([shape], [dtype])
    return memory.fill(os.urandom(memory.get_size()))


def test_the_remote_connector_gives_back_what_was_put(module, daemon):
    cpu = CpuBackend(SHAPE)
    connector = remote(module, daemon.socket, cpu)
    chunks = [chunk(), chunk([16, 3, 8]), chunk(dtype=FLOAT16)]

    async def run() -> None:
        await connector.batched_put(KEYS[:3], chunks)
        assert [memory.references for memory in chunks] == [1, 1, 1]  # LMCache's wrapper gives them back
        assert [await connector.exists(key) for key in KEYS[2:4]] == [True, False]
        got = await connector.batched_get(KEYS[:4])
        assert [memory and memory.content() for memory in got] == [memory.content() for memory in chunks] + [
            None
        ]
        assert [memory and (memory.shapes, memory.dtypes) for memory in got[:3]] == [
            (memory.shapes, memory.dtypes) for memory in chunks
        ]
        assert cpu.held() == 3
        assert await connector.get(KEYS[5]) is None
        assert (await connector.get(KEYS[0])).content() == chunks[0].content()
        assert await connector.batched_async_contains("l", KEYS) == connector.batched_contains(KEYS) == 3
        assert connector.remove_sync(KEYS[1])
        assert not connector.remove_sync(KEYS[1])
        leading = await connector.batched_get_non_blocking("l", KEYS[:3])
        assert [memory.content() for memory in leading] == [chunks[0].content()]
        assert cpu.held() == 5  # three, one, and the leading one: what came after the miss was given back
        await connector.close()

    asyncio.run(run())


def test_a_key_carries_model_workers_dtype_layer_and_tags(module, daemon):
    connector = remote(module, daemon.socket, CpuBackend(SHAPE))
    key = CacheEngineKey(0xABC, tail="@7@tenant%a/b")
    asyncio.run(connector.put(key, chunk()))
    with KvcsLowLevelClient(daemon.socket) as client:
        stored = "org~2fmodel/v1/lmcache/2-1-bfloat16/abc~407~40tenant~25a~2fb"
        assert client.ll_batch_query([stored])[0].total_size == 48 + FULL
    others = [
        {"model_name": "org-model"},
        {"world_size": 1},
        {"worker_id": 0},
        {"dtype": "half"},
        {"tail": ""},
    ]
    assert [connector.exists_sync(CacheEngineKey(**vars(key) | change)) for change in others] == [False] * 5
    asyncio.run(connector.close())


def test_a_chunk_of_another_format_is_not_taken_for_one(module, daemon):
    cpu = CpuBackend(SHAPE)
    connector = remote(module, daemon.socket, cpu)
    mla = MemoryObj([SHAPE], [BFLOAT16], MemoryFormat.KV_MLA_FMT)
    asyncio.run(connector.put(KEYS[0], mla))
    (got,) = asyncio.run(connector.batched_get(KEYS[:1]))
    assert (got.fmt, cpu.held()) == (MemoryFormat.KV_MLA_FMT, 1)
    asyncio.run(connector.close())


def test_a_value_that_is_no_chunk_is_a_miss(module, daemon):
    cpu = CpuBackend(SHAPE)
    connector = remote(module, daemon.socket, cpu)
    with KvcsLowLevelClient(daemon.socket) as client:
        from kvcs import LLPutItem

        for i, value in enumerate([b"x", b"\xff" * 100, b"\0" * 48, os.urandom(FULL + 49)]):
            client.ll_batch_put([LLPutItem(connector.chunks.key(KEYS[i]), value)])
    for key in KEYS[:4]:
        assert asyncio.run(connector.batched_get([key])) == [None]
    assert cpu.held() == 0
    asyncio.run(connector.close())


def test_without_memory_chunks_are_misses(module, daemon):
    cpu = CpuBackend(SHAPE)
    backend = plugin(module, daemon.socket, cpu)
    backend.batched_submit_put_task(KEYS[:3], [chunk() for _ in range(3)])
    assert backend.chunks.store.flush(30)
    cpu.left = 2
    assert [memory is None for memory in backend.batched_get_blocking(KEYS[:3])] == [False, False, True]
    assert backend.batched_get_blocking(KEYS[:3]) == [None] * 3
    assert backend.chunks.store.stats()["no_memory"] == 4
    backend.close()


def test_the_storage_plugin_stores_from_its_queue(module, daemon):
    cpu = CpuBackend(SHAPE)
    backend = plugin(module, daemon.socket, cpu)
    chunks, stored = [chunk() for _ in range(4)], []
    backend.batched_submit_put_task(KEYS[:4], chunks, on_complete_callback=stored.append)
    assert backend.chunks.store.flush(30)
    assert (stored, [memory.references for memory in chunks]) == (KEYS[:4], [1] * 4)
    assert not any(backend.exists_in_put_tasks(key) for key in KEYS)
    assert (backend.contains(KEYS[3]), backend.contains(KEYS[4]), backend.batched_contains(KEYS)) == (
        True,
        False,
        4,
    )
    assert backend.get_blocking(KEYS[2]).content() == chunks[2].content()
    got = asyncio.run(backend.batched_get_non_blocking("l", [*KEYS[:2], KEYS[7], KEYS[3]]))
    assert [memory.content() for memory in got] == [memory.content() for memory in chunks[:2]]
    assert cpu.held() == 3
    assert (backend.pin(KEYS[0]), backend.unpin(KEYS[0]), backend.touch_cache()) == (True, True, None)
    assert (backend.remove(KEYS[0]), backend.remove(KEYS[0])) == (True, False)
    assert asyncio.run(backend.batched_async_contains("l", KEYS[1:])) == 3
    assert backend.get_allocator_backend() is cpu
    backend.close()


def test_what_does_not_fit_into_the_queue_is_dropped_and_its_reference_given_back(module, daemon):
    backend = plugin(module, daemon.socket, CpuBackend(SHAPE), **{"kvcs.queue_bytes": FULL})
    chunks, stored = [chunk(), chunk([16, 3, 8])], []
    backend.batched_submit_put_task(KEYS[:2], chunks, on_complete_callback=stored.append)
    assert backend.chunks.store.flush(30)
    assert [memory.references for memory in chunks] == [1, 1]
    assert (backend.chunks.store.stats()["dropped"], stored) == (1, KEYS[1:2])
    assert not backend.exists_in_put_tasks(KEYS[0])
    backend.close()


def test_memory_that_is_gone_does_not_end_the_engines_thread(module, daemon):
    class Gone(MemoryObj):
        @property
        def byte_array(self) -> Any:
            raise RuntimeError("invalidated")

        @byte_array.setter
        def byte_array(self, view: Any) -> None:
            """As the base class sets it."""

    backend = plugin(module, daemon.socket, CpuBackend(SHAPE))
    gone = Gone([SHAPE], [BFLOAT16])
    backend.batched_submit_put_task(KEYS[:1], [gone])
    backend.chunks.save(KEYS[:1], [gone])
    assert (gone.references, backend.chunks.store.stats()["errors"]) == (1, 2)
    backend.close()


def test_eviction_all_the_time_gives_misses_and_no_wrong_byte(module, tmp_path):
    with Daemon(tmp_path, 2 << 20) as daemon:  # 29 chunks
        cpu = CpuBackend(SHAPE)
        backend = plugin(module, daemon.socket, cpu)
        known, hits = {}, 0
        for turn in range(60):
            key = CacheEngineKey(turn)
            memory = chunk()
            known[key] = memory.content()
            backend.batched_submit_put_task([key], [memory])
            assert backend.chunks.store.flush(30)
            asked = [CacheEngineKey(max(0, turn - back)) for back in (0, 40)]
            for asked_key, got in zip(asked, backend.batched_get_blocking(asked), strict=True):
                assert got is None or got.content() == known[asked_key]
                hits += got is not None
        assert 60 <= hits < 120 - 15
        backend.close()


def test_a_daemon_killed_in_the_middle_is_misses_until_it_is_back(module, daemon):
    cpu = CpuBackend(SHAPE)
    connector, backend = remote(module, daemon.socket, cpu), plugin(module, daemon.socket, cpu)
    first, second = chunk(), chunk()
    asyncio.run(connector.put(KEYS[0], first))
    daemon.kill()
    stored: list[Any] = []
    backend.batched_submit_put_task(KEYS[1:2], [second], on_complete_callback=stored.append)
    assert backend.chunks.store.flush(30)
    asyncio.run(connector.put(KEYS[2], chunk()))
    assert (backend.get_blocking(KEYS[0]), connector.batched_contains(KEYS), stored) == (None, 0, [])
    assert (second.references, cpu.held()) == (1, 0)
    daemon.start()
    assert backend.get_blocking(KEYS[0]).content() == first.content()
    assert backend.batched_contains(KEYS) == 1
    asyncio.run(connector.close())
    backend.close()
