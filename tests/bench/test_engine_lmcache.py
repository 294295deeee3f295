# ruff: noqa: E402, I001  # what is imported when depends on what is there
"""LMCache: 128 objects through our L2 adapter and through its own file adapter, both full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache.v1.storage_backend")

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from tests.bench.engine_times import BATCHES_KEPT, PAGES, Step, capacity, compare
from tests.engines.daemon import Daemon
from tests.engines.test_lmcache_engine import MODEL, adapter, answer, bits

pytestmark = [pytest.mark.bench, pytest.mark.engines]


def keys(turn: int) -> list[Any]:
    return [ObjectKey(turn.to_bytes(16, "big") + i.to_bytes(16, "big"), MODEL, 1) for i in range(PAGES)]


def steps(made: Any, objects: list[Any], deletes: bool) -> tuple[Step, Step]:
    """A file adapter evicts nothing itself: LMCache's controller deletes from it, here the oldest batch."""

    def store(turn: int) -> None:
        if deletes and turn >= BATCHES_KEPT:
            made.delete(keys(turn - BATCHES_KEPT))
        task = made.submit_store_task(keys(turn), objects)
        assert answer(made.get_store_event_fd(), made.pop_completed_store_tasks)[task].is_successful()

    def load(turn: int) -> None:
        task = made.submit_load_task(keys(turn), objects)
        assert all(bits(answer(made.get_load_event_fd(), lambda: made.query_load_result(task)), PAGES))

    return store, load


@pytest.mark.parametrize("page_bytes", [256 << 10, 1 << 20, 4 << 20])
def test_store_and_load(tmp_path: Path, page_bytes: int):
    shape = torch.Size([2, 8, page_bytes // 2 // 8 // 128 // 2, 128])
    allocator = HostMemoryAllocator(PAGES * page_bytes + (16 << 20))
    objects = [allocator.allocate([shape], [torch.bfloat16], MemoryFormat.KV_2LTD) for _ in range(PAGES)]
    for memory in objects:
        memory.tensor.view(torch.int16).random_()
    made = []
    for kind, options in (("fs", {}), ("fs_native", {"num_workers": 4})):
        settings = {"type": kind, "base_path": str(tmp_path / kind)} | options
        (tmp_path / kind).mkdir()
        made.append((kind, create_l2_adapter(get_l2_adapter_config_class(kind).from_dict(settings))))
    with (
        Daemon(tmp_path / "store", capacity(page_bytes)) as daemon,
        adapter(daemon) as ours,
        Daemon(tmp_path / "other", capacity(page_bytes)) as other,
        adapter(other, verify_reads=False) as unverified,
    ):
        contestants = {"kvcsfs": steps(ours, objects, deletes=False)}
        contestants |= {"kvcsfs, unverified": steps(unverified, objects, deletes=False)}
        contestants |= {kind: steps(one, objects, deletes=True) for kind, one in made}
        compare("lmcache L2", page_bytes, contestants)
    for _, one in made:
        one.close()
    for memory in objects:
        memory.ref_count_down()
