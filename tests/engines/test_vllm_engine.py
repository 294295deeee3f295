# ruff: noqa: E402, I001  # what is imported when depends on what is there
"""The tier in the real vLLM: its own factory, and its tiering manager with a primary tier in shared memory."""

from __future__ import annotations

import mmap
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.engines.daemon import Daemon

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
np = pytest.importorskip("numpy")
pytest.importorskip("torch")
pytest.importorskip("vllm")

from tests.engines import without_torchvision  # noqa: F401  # before anything of vLLM's is imported
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingSpec,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

pytestmark = pytest.mark.engines

BLOCK = 64 << 10


def tier_config(daemon: Daemon, **options: Any) -> dict[str, Any]:
    return {"type": "KvcsTier", "module_path": "kvcsfs.connectors.vllm", "socket": daemon.socket} | options


def config(extra: dict[str, Any] | None = None, dtype: str = "bfloat16", **others: Any) -> Any:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("l0", "l1"), 0),),
        worker_kv_bytes_per_block=BLOCK,
        extra_config=extra or {},
        engine_id=f"kvcs-test-{uuid.uuid4().hex}",
        model=OffloadingModelConfig("meta-llama/Llama-3-8B", dtype),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        **{"enable_kv_cache_events": False} | others,
    )


class Spec(OffloadingSpec):  # type: ignore[misc]  # vLLM isn't there when types are checked
    def get_manager(self) -> Any:
        """Not asked for."""

    def get_worker(self, kv_caches: Any) -> Any:
        """Not asked for."""


def key(i: int) -> Any:
    return make_offload_key(i.to_bytes(32, "big"), 0)


KEYS = [key(i) for i in range(6)]


def end_step(manager: Any) -> None:
    manager.on_schedule_end(ScheduleEndContext((), ()))


def eventually(step: Any, seconds: float = 30.0) -> Any:
    """Steps as the scheduler takes them, until one gives an answer."""
    pause = threading.Event()
    for _ in range(int(seconds * 200)):
        answer = step()
        if answer is not None:
            return answer
        pause.wait(0.005)
    raise AssertionError(f"no answer within {seconds} s")


# -- a tier made by the factory


class Tier:
    def __init__(self, settings: dict[str, Any], spec: Any = None) -> None:
        # Aligned, as direct I/O wants it and vLLM has it.
        self.memory = np.frombuffer(mmap.mmap(-1, BLOCK * 16), dtype=np.uint8).reshape(16, BLOCK)
        self.memory[:] = np.random.default_rng(1).integers(0, 256, self.memory.shape, dtype=np.uint8)
        self.tier = SecondaryTierFactory.create_secondary_tier(
            settings, memoryview(self.memory), spec or Spec(config())
        )
        self._requests = 0

    def run(self, submit: Any, keys: list[Any], blocks: list[int]) -> Any:
        self._requests += 1
        submit(
            TransferJob(
                self._requests, keys, np.array(blocks), submit == self.tier.submit_load, ReqContext("r")
            )
        )
        return eventually(lambda: next(iter(self.tier.get_finished_jobs()), None))

    def look(self, keys: list[Any]) -> list[str]:
        self._requests += 1
        request = ReqContext(f"l{self._requests}")
        self.tier.on_new_request(request)

        def step() -> list[str] | None:
            found = [self.tier.lookup(key, request) for key in keys]
            end_step(self.tier)
            return None if LookupResult.RETRY in found else [result.name for result in found]

        answer = eventually(step)
        self.tier.on_request_finished(request)
        return list(answer)


def test_blocks_come_back_to_the_byte_and_a_killed_daemon_is_a_miss(daemon):
    made = Tier(tier_config(daemon))
    assert made.look(KEYS[:2]) == ["MISS", "MISS"]
    done = made.run(made.tier.submit_store, KEYS[:4], [0, 1, 2, 3])
    assert (done.success, done.transfer_bytes) == (True, 4 * BLOCK)
    assert made.look(KEYS[:5]) == ["HIT"] * 4 + ["MISS"]
    assert made.run(made.tier.submit_load, KEYS[:4], [11, 10, 9, 8]).success
    assert np.array_equal(made.memory[[11, 10, 9, 8]], made.memory[:4])
    done = made.run(made.tier.submit_load, [KEYS[0], KEYS[5], KEYS[2]], [4, 5, 6])
    assert (done.success, done.successful_keys) == (False, (KEYS[0], KEYS[2]))
    others = [
        Tier(tier_config(daemon), Spec(config(**one)))
        for one in ({"dtype": "float16"}, {"kv_cache_layout": "LBHNC"})
    ]
    for other in others:
        assert other.look(KEYS[:2]) == ["MISS", "MISS"]
    daemon.kill()
    assert made.look(KEYS[:2]) == ["MISS", "MISS"]
    assert not made.run(made.tier.submit_store, KEYS[5:], [5]).success
    assert not made.run(made.tier.submit_load, KEYS[:2], [12, 13]).success
    daemon.start()
    assert made.look(KEYS) == ["HIT"] * 4 + ["MISS"] * 2
    assert made.run(made.tier.submit_load, KEYS[:2], [12, 13]).success
    assert np.array_equal(made.memory[[12, 13]], made.memory[:2])
    for one in (made, *others):
        one.tier.drain_jobs()
        one.tier.shutdown()


def test_wrong_options_are_said_in_one_line(daemon):
    with pytest.raises(ValueError, match="unknown option 'root_dir', expected one of socket"):
        Tier(tier_config(daemon, root_dir="/x"))
    with pytest.raises(ValueError, match="locality must be a Locality, LOCAL or REMOTE, not 'near'"):
        Tier(tier_config(daemon, locality="near"))


def test_options_of_vllms_own_tiers(daemon):
    options = {"locality": "REMOTE", "backpressure": {"backpressure_cls": "EMABackpressureDetector"}}
    made = Tier(tier_config(daemon, **options))
    assert made.tier.locality is Locality.REMOTE
    assert not made.tier.bp_detector.is_under_pressure()
    made.tier.shutdown()


# -- vLLM's tiering manager, with the tier below a small primary tier


@contextmanager
def manager(daemon: Daemon, blocks: int, events: bool = False, **options: Any) -> Iterator[Any]:
    extra = {"cpu_bytes_to_use": blocks * BLOCK, "secondary_tiers": [tier_config(daemon, **options)]}
    spec = TieringOffloadingSpec(config(extra, enable_kv_cache_events=events))
    made = spec.get_manager()
    try:
        yield made
    finally:
        made.shutdown()


def offload(made: Any, request: Any, keys: list[Any], fill: int) -> list[Any]:
    """What a worker would do: take places in the primary tier, write the blocks there, and say so."""
    out = eventually(lambda: step_of(made, lambda: made.prepare_store(keys, request)))
    view = np.asarray(made.primary_tier.get_kv_memoryview())
    for chunk in out.store_spec.chunk_ids:
        view[chunk] = fill
    made.complete_store(out.keys_to_store, request)
    eventually(lambda: step_of(made, lambda: True if not made.has_pending_work() else None))
    return list(out.keys_to_store)


def step_of(made: Any, act: Any) -> Any:
    answer = act()
    end_step(made)
    return answer


def fetch(made: Any, request: Any, wanted: Any) -> Any:
    """The block's bytes, once it is in the primary tier; the name of the answer otherwise."""

    def step() -> str | None:
        found = made.lookup(wanted, request)
        if found is not LookupResult.HIT:
            end_step(made)
        return None if found in (LookupResult.RETRY, LookupResult.HIT_PENDING) else found.name

    found = eventually(step)
    if found != "HIT":
        return found
    spec = made.prepare_load([wanted], request)
    content = np.asarray(made.primary_tier.get_kv_memoryview())[spec.chunk_ids[0]].copy()
    made.complete_load([wanted], request)
    end_step(made)
    return content


def test_blocks_that_left_the_primary_tier_come_back_from_the_store(daemon):
    with manager(daemon, blocks=8) as made:
        request = ReqContext("a")
        made.on_new_request(request)
        for i in range(24):  # three times what the primary tier holds
            assert offload(made, request, [key(i)], fill=i) == [key(i)]
        made.on_request_finished(request)
        request = ReqContext("b")
        made.on_new_request(request)
        for i in range(24):
            assert (fetch(made, request, key(i)) == i).all()
        assert fetch(made, request, key(99)) == "MISS"
        made.touch([key(1)], request)
        made.on_request_finished(request)
        stats = made.get_stats()
        reduced = stats.reduce()
        assert any("kvcs_saved" in name for name in reduced)
        assert sum(value for name, value in reduced.items() if "kvcs_hits" in name) >= 16


def test_what_was_stored_is_told_through_the_manager(daemon):
    with manager(daemon, blocks=8, events=True, enable_kv_events=True, locality="LOCAL") as made:
        request = ReqContext("a")
        made.on_new_request(request)
        offload(made, request, KEYS[:3], fill=7)
        told = [event for event in made.take_events() if event.medium is Medium.STORAGE]
        assert [(event.keys, event.removed, event.locality) for event in told] == [
            (KEYS[:3], False, Locality.LOCAL)
        ]
        made.on_request_finished(request)


def test_eviction_below_and_a_killed_daemon_give_misses_and_no_wrong_byte(tmp_path):
    counts = {"MISS": 0, "HIT": 0}
    with Daemon(tmp_path, 1 << 20) as daemon, manager(daemon, blocks=4) as made:  # 15 blocks in the store
        for i in range(48):
            if i == 30:
                daemon.kill()
            if i == 36:
                daemon.start()
            request = ReqContext(f"r{i}")
            made.on_new_request(request)
            offload(made, request, [key(i)], fill=i)
            for asked in (max(0, i - 8), max(0, i - 20)):
                content = fetch(made, request, key(asked))
                missed = isinstance(content, str)
                counts["MISS" if missed else "HIT"] += 1
                assert missed or (content == asked).all()
            made.on_request_finished(request)
            end_step(made)
    assert min(counts.values()) > 15
