# ruff: noqa: E402, I001  # what is imported when depends on what is there
"""SGLang: 128 pages through our backend and through HiCacheFile, both full and evicting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from tests.engines import without_torchvision  # noqa: F401  # before anything of SGLang's is imported
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from tests.bench.bare import bare
from tests.bench.engine_times import PAGES, Step, capacity, compare
from tests.engines.daemon import Daemon
from tests.engines.test_sglang_engine import attach, config, host_pool_of

pytestmark = [pytest.mark.bench, pytest.mark.engines]

PAGE_TOKENS, HEADS, DIMENSION = 64, 8, 128  # 256 KiB a layer


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
@pytest.mark.parametrize("layers", [1, 4, 16])
def test_store_and_load(tmp_path: Path, layers: int, layout: str):
    page_bytes = 2 * layers * PAGE_TOKENS * HEADS * DIMENSION * 2
    pool = host_pool_of(layout, torch.bfloat16, layers, HEADS, DIMENSION, PAGE_TOKENS, PAGES * PAGE_TOKENS)
    indices = pool.alloc(PAGES * PAGE_TOKENS)
    first = indices[::PAGE_TOKENS].tolist()
    pool.kv_buffer.view(torch.int16).random_()
    room = capacity(page_bytes)
    memory = memoryview(pool.kv_buffer.view(torch.uint8).flatten().numpy())
    views = [memory[at : at + page_bytes] for at in range(0, PAGES * page_bytes, page_bytes)]
    with (
        Daemon(tmp_path / "store", room) as daemon,
        Daemon(tmp_path / "other", room) as other,
        bare(tmp_path / "bare", views) as floors,
    ):
        ours = attach(daemon, pool, layout)
        faster = attach(other, pool, layout, verify_reads=False)
        limited = {"file_storage_path": str(tmp_path / "files"), "max_size": str(room)}
        files = HiCacheFile(config(layout, limited))

        def keys(turn: int) -> list[str]:
            return [f"{turn:032x}{i:032x}" for i in range(PAGES)]

        def steps(storage: Any) -> tuple[Step, Step]:
            def store(turn: int) -> None:
                assert all(storage.batch_set_v1(keys(turn), indices))

            def load(turn: int) -> None:
                assert all(storage.batch_get_v1(keys(turn), indices))

            return store, load

        def store_files(turn: int) -> None:  # as the controller's generic path does
            assert files.batch_set(keys(turn), [pool.get_data_page(i) for i in first])

        def load_files(turn: int) -> None:
            pages: list[Any] = files.batch_get(keys(turn), [pool.get_dummy_flat_data_page() for _ in first])
            for i, page in zip(first, pages, strict=True):
                pool.set_from_flat_data_page(i, page)

        contestants = {
            **floors,
            "kvcsfs": steps(ours),
            "kvcsfs, unverified": steps(faster),
            "HiCacheFile": (store_files, load_files),
        }
        compare(f"sglang {layout}", page_bytes, contestants)
        ours.close()
        faster.close()
