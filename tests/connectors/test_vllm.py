"""The vLLM tier with small stand-ins for its manager's parts, on a real daemon."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from kvcs import KvcsLowLevelClient, LLPutItem
from tests.connectors.fakes.vllm import (
    VLLM,
    JobResult,
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    ReqContext,
    TransferJob,
)
from tests.engines.daemon import Daemon

CONNECTOR = ("vllm", VLLM)
BLOCK = 64 << 10
FIELDS = {"model_name": "org/model", "dtype": "bfloat16", "tp_size": 1}
REQUEST = ReqContext("r")


def offload_key(i: int, group: int = 0) -> bytes:
    return i.to_bytes(32, "big") + group.to_bytes(4, "big")


KEYS = [offload_key(i) for i in range(8)]


class Tier:
    """A tier with the memory that vLLM would give it."""

    def __init__(
        self,
        module: Any,
        socket: str,
        blocks: int = 16,
        fields: Any = FIELDS,
        block: int = BLOCK,
        kv_cache_layout: str = "LBNHC",
        events: bool = False,
        **options: Any,
    ) -> None:
        """`events`: whether vLLM publishes any."""
        self.memory = bytearray(os.urandom(blocks * block))
        view = memoryview(self.memory).cast("B", (blocks, block))
        spec = SimpleNamespace(
            fields=fields,
            blocks_per_chunk=1,
            config=SimpleNamespace(kv_cache_layout=kv_cache_layout),
            kv_events_config=SimpleNamespace(enable_kv_cache_events=events),
        )
        self.tier = module.KvcsTier(spec, view, "kvcs", socket=socket, **options)
        self._last = 0

    def block(self, i: int) -> bytes:
        return bytes(self.memory[i * BLOCK : (i + 1) * BLOCK])

    def store(self, keys: list[bytes], blocks: list[int]) -> JobResult:
        return self._job(self.tier.submit_store, keys, blocks)

    def load(self, keys: list[bytes], blocks: list[int]) -> JobResult:
        return self._job(self.tier.submit_load, keys, blocks)

    def _job(self, submit: Any, keys: list[bytes], blocks: list[int]) -> JobResult:
        self._last += 1
        submit(TransferJob(self._last, keys, blocks))
        self.tier.drain_jobs()
        result: JobResult
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == self._last
        return result

    def lookup(self, keys: list[bytes]) -> list[str]:
        assert {self.tier.lookup(key, REQUEST) for key in keys} == {LookupResult.RETRY}
        self.tier.on_schedule_end(None)
        return [self.tier.lookup(key, REQUEST).name for key in keys]


def test_blocks_come_back_to_the_byte_into_other_places(module, daemon):
    tier = Tier(module, daemon.socket)
    assert tier.lookup(KEYS[:2]) == ["MISS", "MISS"]
    tier.tier.on_request_finished(REQUEST)
    done = tier.store(KEYS[:3], [4, 1, 2])
    assert (done.success, done.transfer_bytes) == (True, 3 * BLOCK)
    assert tier.lookup(KEYS[:4]) == ["HIT"] * 3 + ["MISS"]
    done = tier.load(KEYS[:3], [9, 8, 10])
    assert (done.success, done.successful_keys, done.transfer_bytes) == (True, None, 3 * BLOCK)
    assert done.transfer_time is not None
    assert done.transfer_time > 0
    assert [tier.block(i) for i in (9, 8, 10)] == [tier.block(i) for i in (4, 1, 2)]
    assert not tier.tier.has_pending_work()
    assert list(tier.tier.get_finished_jobs()) == []
    tier.tier.shutdown()


def test_a_load_that_misses_some_keeps_the_others_and_stops_asking(module, daemon):
    tier = Tier(module, daemon.socket)
    tier.store(KEYS[:4], [0, 1, 2, 3])
    assert tier.lookup(KEYS[:4]) == ["HIT"] * 4
    with KvcsLowLevelClient(daemon.socket) as client:
        assert client.ll_batch_delete([tier.tier.key(KEYS[1])])[0].status == 0
    done = tier.load(KEYS[:4], [8, 9, 10, 11])
    assert (done.success, done.successful_keys) == (False, (KEYS[0], KEYS[2], KEYS[3]))
    assert [tier.block(i) for i in (8, 10, 11)] == [tier.block(i) for i in (0, 2, 3)]
    assert [tier.tier.lookup(key, REQUEST).name for key in KEYS[:2]] == ["HIT", "MISS"]
    done = tier.load(KEYS[5:6], [8])
    assert (done.success, done.successful_keys) == (False, None)
    tier.tier.shutdown()


def test_what_vllm_tells_caches_apart_by_is_in_the_key(module, daemon):
    tier = Tier(module, daemon.socket)
    tier.store([offload_key(1)], [0])
    key = tier.tier.key(offload_key(0xAB, 3))
    assert key.startswith("org~2fmodel/v1/vllm/bfloat16/")
    assert key.endswith(f"/r0/g3-{0xAB:064x}")
    for fields in (
        FIELDS | {"tp_size": 2},
        FIELDS | {"dtype": "float16"},
        FIELDS | {"model_name": "org-model"},
    ):
        other = Tier(module, daemon.socket, fields=fields)
        assert other.lookup([offload_key(1)]) == ["MISS"]
        other.tier.shutdown()
    for other in (
        Tier(module, daemon.socket, block=2 * BLOCK),
        Tier(module, daemon.socket, kv_cache_layout="LBHNC"),
    ):
        assert other.lookup([offload_key(1)]) == ["MISS"]
        other.tier.shutdown()
    assert tier.lookup([offload_key(1, 1)]) == ["MISS"]
    tier.tier.shutdown()


def test_a_value_of_another_size_is_a_miss_and_makes_way(module, daemon):
    tier = Tier(module, daemon.socket)
    with KvcsLowLevelClient(daemon.socket) as client:
        client.ll_batch_put([LLPutItem(tier.tier.key(KEYS[0]), b"short")])
        assert not tier.load(KEYS[:1], [1]).success
        assert tier.lookup(KEYS[:2]) == ["MISS", "MISS"]
    assert tier.store(KEYS[:1], [0]).success
    tier.tier.on_request_finished(REQUEST)
    assert tier.lookup(KEYS[:1]) == ["HIT"]
    assert tier.load(KEYS[:1], [1]).success
    assert tier.block(0) == tier.block(1)
    tier.tier.shutdown()


def test_touched_blocks_outlive_others(module, tmp_path):
    with Daemon(tmp_path, 1 << 20) as daemon:  # 15 blocks
        tier = Tier(module, daemon.socket)
        tier.store(KEYS, list(range(8)))
        tier.tier.touch(KEYS[:1], REQUEST)
        tier.tier._threads.submit(lambda: None).result(30)  # after the touch, or beside it:
        tier.tier._threads.shutdown(wait=True)
        for i in range(100, 112):
            tier.store([offload_key(i)], [8])
        assert tier.lookup(KEYS[:2]) == ["HIT", "MISS"]
        tier.tier.touch(KEYS[:1], REQUEST)  # shut down: left out
        assert not tier.load(KEYS[:1], [9]).success
        tier.tier.shutdown()


def test_what_does_not_fit_into_the_queue_fails_its_job(module, daemon):
    tier = Tier(module, daemon.socket, queue_bytes=BLOCK)
    assert not tier.store(KEYS, list(range(8))).success
    counters = tier.tier.get_stats().counters
    assert counters["vllm:kv_offload_kvcs_dropped_blocks"] >= 1
    assert sum(counters.values()) == 8
    tier.tier.shutdown()


def test_metrics_are_what_was_counted_since_the_last_call(module, daemon):
    tier = Tier(module, daemon.socket)
    names = tier.tier.build_metric_definitions({})
    tier.store(KEYS[:2], [0, 1])
    tier.load(KEYS[1:4], [4, 5, 6])
    counters = tier.tier.get_stats().counters
    assert counters == {
        f"vllm:kv_offload_kvcs_{n}_blocks": i for n, i in (("hits", 1), ("misses", 2), ("saved", 2))
    }
    assert set(counters) <= set(names)
    assert tier.tier.get_stats().counters == {}
    tier.tier.shutdown()


def test_what_was_stored_is_told_once_where_vllm_publishes_events(module, daemon):
    tier = Tier(module, daemon.socket, events=True, enable_kv_events=True, locality="LOCAL", queue_items=2)
    tier.store(KEYS[:2], [0, 1])
    tier.load(KEYS[:2], [4, 5])
    told = OffloadingEvent(KEYS[:2], Medium.STORAGE, removed=False, locality=Locality.LOCAL)
    assert list(tier.tier.take_events()) == [told]
    assert list(tier.tier.take_events()) == []
    done = tier.store(KEYS[2:], [99, *range(5)])  # the first lies outside of the memory
    assert not done.success
    (event,) = tier.tier.take_events()
    assert 0 < len(event.keys) * BLOCK == done.transfer_bytes
    assert KEYS[2] not in event.keys
    assert not tier.store(KEYS[2:3], [99]).success
    assert list(tier.tier.take_events()) == []
    tier.tier.shutdown()


def test_events_want_the_tiers_own_option_and_vllms(module, daemon, caplog):
    for events, own in ((True, False), (False, True)):
        tier = Tier(module, daemon.socket, events=events, enable_kv_events=own)
        assert tier.store(KEYS[:1], [0]).success
        assert list(tier.tier.take_events()) == []
        assert tier.tier.locality is None
        tier.tier.shutdown()
    (said,) = [record.message for record in caplog.records if record.name == "kvcs.connectors"]
    assert said == "enable_kv_events is without effect: vLLM publishes events only with --kv-events-config"


def test_blocks_outside_of_the_memory_fail_alone(module, daemon):
    tier = Tier(module, daemon.socket, blocks=4)
    done = tier.store(KEYS[:3], [3, 4, -2])
    assert (done.success, done.transfer_bytes) == (False, BLOCK)
    assert tier.lookup(KEYS[:3]) == ["HIT", "MISS", "MISS"]
    before = bytes(tier.memory)
    done = tier.load([KEYS[0]] * 3, [-1, 4, 0])
    assert not done.success
    assert tier.block(3) == before[3 * BLOCK :]
    tier.tier.shutdown()


@pytest.mark.parametrize("blocks", [[0], [0, 1, 2], [0, None]])
def test_a_job_whose_places_can_not_be_told_fails_and_ends(module, daemon, blocks):
    tier = Tier(module, daemon.socket)
    for transfer in (tier.store, tier.load):
        assert not transfer(KEYS[:2], blocks).success
    assert not tier.tier.has_pending_work()
    assert tier.tier.store.stats()["errors"] == 2
    tier.tier.shutdown()


def test_jobs_of_nothing_end(module, daemon):
    tier = Tier(module, daemon.socket)
    assert tier.store([], []).success
    assert tier.load([], []).success
    tier.tier.shutdown()


def test_a_daemon_killed_in_the_middle_is_misses_until_it_is_back(module, daemon):
    tier = Tier(module, daemon.socket)
    tier.store(KEYS[:2], [0, 1])
    daemon.kill()
    assert not tier.load(KEYS[:2], [4, 5]).success
    assert not tier.store(KEYS[2:3], [2]).success
    assert tier.lookup(KEYS[:3]) == ["MISS"] * 3
    tier.tier.on_request_finished(REQUEST)
    daemon.start()
    assert tier.lookup(KEYS[:3]) == ["HIT", "HIT", "MISS"]
    assert tier.load(KEYS[:2], [4, 5]).success
    assert [tier.block(4), tier.block(5)] == [tier.block(0), tier.block(1)]
    tier.tier.shutdown()


def test_eviction_all_the_time_gives_misses_and_no_wrong_byte(module, tmp_path):
    with Daemon(tmp_path, 1 << 20) as daemon:
        tier = Tier(module, daemon.socket)
        known: dict[bytes, bytes] = {}
        results = []
        for turn in range(40):
            keys = [offload_key(turn * 4 + i) for i in range(4)]
            tier.memory[: 4 * BLOCK] = os.urandom(4 * BLOCK)
            known |= {key: tier.block(i) for i, key in enumerate(keys)}
            tier.store(keys, [0, 1, 2, 3])
            asked = [offload_key(max(0, turn - 3) * 4 + i) for i in range(4)]
            done = tier.load(asked, [8, 9, 10, 11])
            there = asked if done.success else list(done.successful_keys or ())
            results.append(len(there))
            for key in there:
                assert tier.block(8 + asked.index(key)) == known[key]
        assert min(results) < 4 <= max(results)
        tier.tier.shutdown()


def test_a_wrong_option_is_refused(module):
    with pytest.raises(ValueError, match="unknown option 'root_dir'"):
        Tier(module, "/none", root_dir="/x")
    with pytest.raises(ValueError, match="enable_kv_events must be true or false, not 1"):
        Tier(module, "/none", enable_kv_events=1)
    for locality in ("local", ""):
        with pytest.raises(
            ValueError, match=f"locality must be a Locality, LOCAL or REMOTE, not '{locality}'"
        ):
            Tier(module, "/none", locality=locality)
