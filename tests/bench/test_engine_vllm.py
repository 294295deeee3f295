# ruff: noqa: E402, I001  # what is imported when depends on what is there
"""vLLM: 128 blocks through our tier and through its own file tier, both full."""

from __future__ import annotations

import mmap
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
from tests.bench.bare import bare
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
    pages = mmap.mmap(
        -1, PAGES * page_bytes
    )  # aligned, as the file tier's direct I/O wants it and vLLM has it
    memory = np.frombuffer(pages, dtype=np.uint8).reshape(PAGES, page_bytes)
    memory[:] = np.random.default_rng(1).integers(0, 256, memory.shape, dtype=np.uint8)
    with (
        Daemon(tmp_path / "store", capacity(page_bytes)) as daemon,
        Daemon(tmp_path / "other", capacity(page_bytes)) as other,
        bare(tmp_path / "bare", [memoryview(page) for page in memory]) as floors,
    ):

        def tier(settings: dict[str, Any]) -> Any:
            return SecondaryTierFactory.create_secondary_tier(settings, memoryview(memory), Spec(config()))

        ours, unverified = tier(tier_config(daemon)), tier(tier_config(other, verify_reads=False))
        direct = tier({"type": "fs", "root_dir": str(tmp_path / "direct")})
        buffered = tier({"type": "fs", "root_dir": str(tmp_path / "buffered")})
        buffered._use_o_direct = False  # as it decides by itself on a file system without

        def evictor(files: Any) -> Step:
            """The file tier evicts nothing; an evictor beside it would unlink as much."""

            def evict(turn: int) -> None:
                if turn >= BATCHES_KEPT:
                    for one in keys(turn - BATCHES_KEPT):
                        os.unlink(files.file_mapper.get_file_name(one))

            return evict

        def nothing(turn: int) -> None:
            """The store evicts by itself."""

        contestants = {
            **floors,
            "kvcsfs": steps(ours, nothing),
            "kvcsfs, unverified": steps(unverified, nothing),
            "fs tier, direct": steps(direct, evictor(direct)),
            "fs tier, buffered": steps(buffered, evictor(buffered)),
        }
        compare("vllm", page_bytes, contestants)
        for one in (ours, unverified, direct, buffered):
            one.shutdown()
