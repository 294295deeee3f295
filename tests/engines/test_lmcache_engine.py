# ruff: noqa: E402  # the engine is imported once it is known to be there
"""The LMCache connectors inside the real LMCache, with memory that it allocates, on the CPU."""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.engines.daemon import Daemon

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
torch = pytest.importorskip("torch")
pytest.importorskip("lmcache.v1.storage_backend")

from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend import CreateStorageBackends

pytestmark = pytest.mark.engines

MODEL = "meta-llama/Llama-3-8B"
KV_SHAPE = (8, 2, 256, 2, 64)  # layers, keys and values, tokens of a chunk, heads, dimension: 1 MiB
SHAPE = torch.Size([2, 8, 256, 128])
CHUNK = 1 << 20


def connector(daemon: Daemon, kind: str) -> dict[str, Any]:
    """The part of LMCache's configuration that names a connector of ours."""
    plug = {"remote": "remote_storage_plugin", "plugin": "storage_plugin"}[kind]
    extra = {
        f"{plug}.kvcs.module_path": "kvcsfs.connectors.lmcache",
        f"{plug}.kvcs.class_name": {"remote": "KvcsConnector", "plugin": "KvcsBackend"}[kind],
        "kvcs.socket": daemon.socket,
    }
    return {f"{plug}s": ["kvcs"], "extra_config": extra}


@contextmanager
def backend(configured: dict[str, Any]) -> Iterator[Any]:
    """LMCache's own loader makes the backend out of a configuration, as an engine's would."""
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=256, local_cpu=False, max_local_cpu_size=0.25, **configured
    )
    metadata = LMCacheMetadata(
        model_name=MODEL, world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
        kv_dtype=torch.bfloat16, kv_shape=KV_SHAPE,
    )  # fmt: skip
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    backends = CreateStorageBackends(config, metadata, loop, "cpu")
    others = [made for key, made in backends.items() if key != "LocalCPUBackend"]
    assert len(others) == 1, f"LMCache made no backend besides its memory: {list(backends)}"
    try:
        yield others[0]
    finally:
        others[0].close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def key(i: int) -> Any:
    return CacheEngineKey(MODEL, 1, 0, 0xABC000 + i, torch.bfloat16)


def chunk(made: Any, shape: Any = SHAPE) -> Any:
    memory = made.local_cpu_backend.allocate([shape], [torch.bfloat16], MemoryFormat.KV_2LTD)
    memory.tensor.copy_(torch.randn(shape).to(torch.bfloat16))
    return memory


@pytest.mark.parametrize("kind", ["remote", "plugin"])
def test_chunks_come_back_to_the_bit(daemon, kind):
    with backend(connector(daemon, kind)) as made:
        shapes = [SHAPE, SHAPE, torch.Size([2, 8, 31, 128])]  # the last chunk of a prompt is shorter
        chunks = [chunk(made, shape) for shape in shapes]
        keys = [key(i) for i in range(3)]
        made.batched_submit_put_task(keys, chunks)
        wait_for(made, len(keys))
        assert made.contains(keys[2])
        assert not made.contains(key(9))
        assert made.batched_contains([*keys, key(9), keys[0]]) == 3
        for memory, got in zip(chunks, made.batched_get_blocking(keys), strict=True):
            assert got.get_shape() == memory.get_shape()
            assert got.get_dtype() == torch.bfloat16
            assert torch.equal(got.tensor, memory.tensor)
            got.ref_count_down()
        assert made.get_blocking(key(9)) is None
        assert made.batched_get_blocking([keys[0], key(9)])[1] is None
        assert {memory.get_ref_count() for memory in chunks} == {1}
        for memory in chunks:
            memory.ref_count_down()


def wait_for(made: Any, ended: int, seconds: float = 30.0) -> None:
    """Until so many puts have ended, one way or the other: LMCache's remote puts are coroutines that nobody awaits."""
    store = (made if hasattr(made, "chunks") else made.connection.getWrappedConnector()).chunks.store
    stopped = threading.Event()
    for _ in range(int(seconds * 200)):
        counts = store.stats()
        if counts.get("saved", 0) + counts.get("save_failed", 0) >= ended:
            return
        stopped.wait(0.005)
    raise AssertionError(f"not stored within {seconds} s: {store.stats()}")


@pytest.mark.parametrize("kind", ["remote", "plugin"])
def test_eviction_all_the_time_and_a_killed_daemon_give_misses_alone(tmp_path, kind):
    with Daemon(tmp_path, 12 << 20) as daemon, backend(connector(daemon, kind)) as made:  # 11 chunks
        known, hits, misses = {}, 0, 0
        for turn in range(36):
            if turn == 24:
                daemon.kill()
            if turn == 28:
                daemon.start()
            memory = chunk(made)
            known[turn] = memory.tensor.clone()
            made.batched_submit_put_task([key(turn)], [memory])
            wait_for(made, turn + 1)
            memory.ref_count_down()
            asked = sorted({turn, max(0, turn - 4), max(0, turn - 15)})
            for i, got in zip(asked, made.batched_get_blocking([key(i) for i in asked]), strict=True):
                hits, misses = hits + (got is not None), misses + (got is None)
                assert got is None or (24 <= turn < 28) is False
                if got is not None:
                    assert torch.equal(got.tensor, known[i])
                    got.ref_count_down()
        assert hits > 36
        assert misses > 20
        # nothing was leaked: all the memory can be had again
        free = [chunk(made) for _ in range(200)]
        assert all(memory is not None for memory in free)
        for memory in free:
            memory.ref_count_down()


# -- the L2 adapter


def l2_connector(daemon: Daemon, **options: Any) -> dict[str, Any]:
    """The specification of our adapter."""
    return {
        "type": "plugin",
        "module_path": "kvcsfs.connectors.lmcache_l2",
        "class_name": "KvcsL2Adapter",
        "adapter_params": {"socket": daemon.socket} | options,
    }


@contextmanager
def adapter(specification: dict[str, Any]) -> Iterator[Any]:
    """An adapter as LMCache's server makes it."""
    kind = specification["type"]
    made = create_l2_adapter(get_l2_adapter_config_class(kind).from_dict(specification))
    made.set_backend_identity(kind)
    yield made
    made.close()


def answer(fd: int, ask: Callable[[], Any]) -> Any:
    while True:
        assert select.select([fd], [], [], 30)[0], "no event within 30 s"
        os.eventfd_read(fd)
        if (result := ask()) is not None and result != {}:
            return result


def bits(bitmap: Any, count: int) -> list[bool]:
    return [bool(bitmap.test(i)) for i in range(count)]


def store(made: Any, keys: list[Any], memories: list[Any]) -> Any:
    task = made.submit_store_task(keys, memories)
    return answer(made.get_store_event_fd(), made.pop_completed_store_tasks)[task]


def look(made: Any, keys: list[Any], shape: Any = SHAPE) -> list[bool]:
    layout = {0: MemoryLayoutDesc([shape], [torch.bfloat16])}
    task = made.submit_lookup_and_lock_task(keys, layout)
    found = answer(made.get_lookup_and_lock_event_fd(), lambda: made.query_lookup_and_lock_result(task))
    made.submit_unlock(keys)
    return bits(found, len(keys))


def load(made: Any, keys: list[Any], into: list[Any]) -> list[bool]:
    task = made.submit_load_task(keys, into)
    return bits(answer(made.get_load_event_fd(), lambda: made.query_load_result(task)), len(keys))


def test_objects_come_back_to_the_bit_and_a_killed_daemon_is_a_miss(daemon):
    allocator = HostMemoryAllocator(64 << 20)

    def objects(count: int) -> list[Any]:
        made = [allocator.allocate([SHAPE], [torch.bfloat16], MemoryFormat.KV_2LTD) for _ in range(count)]
        for memory in made:
            memory.tensor.copy_(torch.randn(SHAPE).to(torch.bfloat16))
        return made

    keys = [ObjectKey(bytes([i]) * 32, MODEL, 0x02010201) for i in range(4)]
    with adapter(l2_connector(daemon)) as made:
        stored, out = objects(3), objects(4)
        result = store(made, keys[:3], stored)
        assert result.is_successful()
        assert result.bytes_transferred() == 3 * CHUNK
        assert made.get_usage().total_bytes_used == 3 * CHUNK
        assert look(made, keys) == load(made, keys, out) == [True, True, True, False]
        assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(stored, out[:3], strict=True))
        daemon.kill()
        assert look(made, keys) == load(made, keys, out) == [False] * 4
        assert not store(made, keys[3:], objects(1)).is_successful()
        daemon.start()
        again = objects(4)
        assert load(made, keys, again) == [True, True, True, False]
        assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(stored, again[:3], strict=True))
        made.delete(keys[:1])
        assert look(made, keys) == [False, True, True, False]
        assert made.get_usage().total_bytes_used == 2 * CHUNK
        assert made.report_status()["is_healthy"]


def test_objects_under_eviction_are_right_or_missing(tmp_path):
    allocator = HostMemoryAllocator(64 << 20)
    memory, out = (allocator.allocate([SHAPE], [torch.bfloat16], MemoryFormat.KV_2LTD) for _ in range(2))
    seen = set()
    with Daemon(tmp_path, 8 << 20) as daemon, adapter(l2_connector(daemon)) as made:
        for turn in range(32):
            memory.tensor.fill_(turn)
            store(made, [ObjectKey(bytes([turn]) * 32, MODEL, 1)], [memory])
            for asked in (turn, max(0, turn - 12)):
                (hit,) = load(made, [ObjectKey(bytes([asked]) * 32, MODEL, 1)], [out])
                seen.add(hit)
                assert not hit or bool((out.tensor == asked).all())
    assert seen == {True, False}
