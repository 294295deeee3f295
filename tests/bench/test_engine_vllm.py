# ruff: noqa: E402, I001  # what is imported when depends on what is there
"""vLLM: 128 blocks through our tier and through its own file tier, both full."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("torch")
pytest.importorskip("vllm")

from tests.engines import without_torchvision  # noqa: F401  # before anything of vLLM's is imported
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from tests.bench.engine_times import BATCHES_KEPT, PAGES, Step, capacity, compare
from tests.engines.daemon import Daemon
from tests.engines.test_vllm_engine import Spec, config, key, tier_config

pytestmark = [pytest.mark.bench, pytest.mark.engines]


def keys(turn: int) -> list[Any]:
    return [key(turn * PAGES + i) for i in range(PAGES)]


def steps(tier: Any, evict: Step) -> tuple[Step, Step]:
    places = np.arange(PAGES)

    def run(submit: Any, turn: int) -> None:
        submit(TransferJob(turn, keys(turn), places, submit == tier.submit_load, ReqContext("r")))
        tier.drain_jobs()
        (done,) = tier.get_finished_jobs()
        assert done.success

    def store(turn: int) -> None:
        evict(turn)
        run(tier.submit_store, turn)

    return store, lambda turn: run(tier.submit_load, turn)


@pytest.mark.parametrize("page_bytes", [256 << 10, 1 << 20, 4 << 20])
def test_store_and_load(tmp_path: Path, page_bytes: int):
    memory = np.random.default_rng(1).integers(0, 256, (PAGES, page_bytes), dtype=np.uint8)
    with Daemon(tmp_path / "store", capacity(page_bytes)) as daemon:

        def tier(settings: dict[str, Any]) -> Any:
            return SecondaryTierFactory.create_secondary_tier(settings, memoryview(memory), Spec(config()))

        ours = tier(tier_config(daemon))
        files = tier({"type": "fs", "root_dir": str(tmp_path / "files")})

        def evict(turn: int) -> None:
            """The file tier evicts nothing; an evictor beside it would unlink as much."""
            if turn >= BATCHES_KEPT:
                for one in keys(turn - BATCHES_KEPT):
                    os.unlink(files.file_mapper.get_file_name(one))

        compare(
            "vllm", page_bytes, {"kvcsfs": steps(ours, lambda turn: None), "fs tier": steps(files, evict)}
        )
        for one in (ours, files):
            one.shutdown()
