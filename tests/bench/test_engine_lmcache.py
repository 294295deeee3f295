# ruff: noqa: E402, I001  # what is imported when depends on what is there
"""LMCache: 128 objects through our L2 adapter and through its own file adapter, both full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache.v1.storage_backend")

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from tests.bench.bare import bare
from tests.bench.engine_times import BATCHES_KEPT, PAGES, Step, capacity, compare
from tests.engines.daemon import Daemon
from tests.engines.test_lmcache_engine import MODEL, adapter, l2_connector, load, store

pytestmark = [pytest.mark.bench, pytest.mark.engines]


def keys(turn: int) -> list[Any]:
    return [ObjectKey(turn.to_bytes(16, "big") + i.to_bytes(16, "big"), MODEL, 1) for i in range(PAGES)]


def steps(made: Any, objects: list[Any], deletes: bool) -> tuple[Step, Step]:
    """A file adapter evicts nothing itself: LMCache's controller deletes from it, here the oldest batch."""

    def store_keys(turn: int) -> None:
        if deletes and turn >= BATCHES_KEPT:
            made.delete(keys(turn - BATCHES_KEPT))
        assert store(made, keys(turn), objects).is_successful()

    def load_keys(turn: int) -> None:
        assert all(load(made, keys(turn), objects))

    return store_keys, load_keys


@pytest.mark.parametrize("page_bytes", [256 << 10, 1 << 20, 4 << 20])
def test_store_and_load(tmp_path: Path, page_bytes: int):
    shape = torch.Size([2, 8, page_bytes // 2 // 8 // 128 // 2, 128])
    allocator = HostMemoryAllocator(PAGES * page_bytes + (16 << 20))
    objects = [allocator.allocate([shape], [torch.bfloat16], MemoryFormat.KV_2LTD) for _ in range(PAGES)]
    for memory in objects:
        memory.tensor.view(torch.int16).random_()
    (tmp_path / "native").mkdir()
    views = [memoryview(memory.tensor.view(torch.uint8).flatten().numpy()) for memory in objects]
    with (
        bare(tmp_path / "bare", views) as floors,
        Daemon(tmp_path / "store", capacity(page_bytes)) as daemon,
        adapter(l2_connector(daemon)) as ours,
        Daemon(tmp_path / "other", capacity(page_bytes)) as other,
        adapter(l2_connector(other, verify_reads=False)) as unverified,
        adapter({"type": "fs", "base_path": str(tmp_path / "fs")}) as files,
        adapter({"type": "fs_native", "base_path": str(tmp_path / "native"), "num_workers": 4}) as native,
    ):
        contestants = {**floors, "kvcsfs": steps(ours, objects, deletes=False)}
        contestants |= {"kvcsfs, unverified": steps(unverified, objects, deletes=False)}
        contestants |= {"fs": steps(files, objects, deletes=True)}
        contestants |= {"fs_native": steps(native, objects, deletes=True)}
        compare("lmcache L2", page_bytes, contestants)
    for memory in objects:
        memory.ref_count_down()
