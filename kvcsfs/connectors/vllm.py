"""vLLM: a secondary tier of its tiering KV offload (`TieringOffloadingSpec`).

Blocks go straight between the store and vLLM's memory; every call of the scheduler returns at once.
Source: vllm 0.33.0, `v1/kv_offload/tiering/base.py`, `tiering/async_lookup.py`, `file_mapper.py`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

from kvcsfs.connectors.engines import missing
from kvcsfs.connectors.jobs import Job, Jobs
from kvcsfs.connectors.keys import KeySpace
from kvcsfs.connectors.settings import Settings
from kvcsfs.connectors.store import Store

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingCounterMetadata,
        OffloadingEvent,
        RequestOffloadingContext,
        get_offload_block_hash,
        get_offload_group_idx,
    )
    from vllm.v1.kv_offload.file_mapper import FileMapper
    from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
except ImportError as exc:
    raise missing("vllm", "0.33.0", exc) from exc

log = logging.getLogger("kvcs.connectors")

METRICS = {
    "hits": "Blocks read from kvcsfs.",
    "misses": "Blocks that kvcsfs did not have when they were to be read.",
    "saved": "Blocks stored in kvcsfs.",
    "dropped": "Blocks not stored because the queue to kvcsfs was full.",
    "save_failed": "Blocks that kvcsfs did not take.",
    "load_failed": "Blocks that could not be read from kvcsfs.",
}
MAX_TOUCHES = 64  # batches that may wait; recency is a hint


@dataclass(frozen=True)
class TierSettings(Settings):
    """With what vLLM's own tiers take besides: whether to tell of stored blocks, and where they lie, seen from vLLM."""

    enable_kv_events: bool = False
    locality: str = ""


class _Lookup(AsyncLookupManager):
    """Questions of one step, as one query in a thread of vLLM's."""

    def __init__(self, tier: KvcsTier, tier_type: str) -> None:
        super().__init__(tier_type=tier_type)
        self._tier = tier

    def batch_lookup(self, keys: list[Any], req_context: Any) -> Iterable[bool]:
        return self._tier.there([self._tier.key(key) for key in keys])


class KvcsTier(SecondaryTierManager):
    """Nothing raises but the constructor. Parameters of the tier's configuration: see `TierSettings`."""

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        """Raises ValueError: an option that can't be used."""
        settings = TierSettings.take(options)
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if "locality" in options:
            self.locality = _locality(settings.locality)
        self._events: list[OffloadingEvent] = []
        self._tells = settings.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        if settings.enable_kv_events and not self._tells:
            log.warning(
                "enable_kv_events is without effect: vLLM publishes events only with --kv-events-config"
            )
        self.store = Store(settings)
        self._space = _space(offloading_spec, settings.version, self.block_size_bytes)
        self._bytes = memoryview(primary_kv_view).cast("B")
        self._jobs: Jobs[tuple[TransferJob, bool]] = Jobs()  # and whether it loads
        self._threads = ThreadPoolExecutor(settings.load_threads, thread_name_prefix="kvcs-load")
        self._touches = threading.Semaphore(MAX_TOUCHES)
        self._lookup = _Lookup(self, tier_type)
        self._told: Counter[str] = Counter()

    def key(self, key: Any) -> str:
        """An OffloadKey's key in the store."""
        return self._space.key(f"g{get_offload_group_idx(key)}-{get_offload_block_hash(key).hex()}")

    # -- questions

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """RETRY until the step's query is answered."""
        found = self._lookup.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def there(self, named: list[str]) -> list[bool]:
        """Which keys hold a block. A value of another size, found each time and never read, is deleted."""
        sizes = self.store.sizes(named)
        wrong = [
            key for key, size in zip(named, sizes, strict=True) if size not in (0, self.block_size_bytes)
        ]
        if wrong:
            self.store.count("wrong_size", len(wrong))
            self.store.remove(wrong)
        return [size == self.block_size_bytes for size in sizes]

    def on_schedule_end(self, context: Any) -> None:
        self._lookup.flush()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookup.cleanup(req_context.req_id)

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        """Tell the store that blocks are in use; left out if it lags behind."""
        if self._touches.acquire(blocking=False):
            named = [self.key(key) for key in keys]

            def run() -> None:
                try:
                    self.store.touch(named)
                finally:
                    self._touches.release()

            self._submit(run)

    # -- transfers

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Queue blocks; those that don't fit into the queue are dropped and counted, and the job has failed."""
        job = self._jobs.start((job_metadata, False), len(job_metadata.keys))
        for place, (key, block) in enumerate(zip(job_metadata.keys, self._blocks(job_metadata), strict=True)):
            if not self.store.save_later(self.key(key), block, self._settler(job, place)):
                self._jobs.settle(job, place, ok=False)

    def _settler(self, job: Job[Any], place: int) -> Any:
        return lambda ok: self._jobs.settle(job, place, ok)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Read blocks in a thread, into the places that vLLM keeps for them."""
        job = self._jobs.start((job_metadata, True), len(job_metadata.keys))
        named = [self.key(key) for key in job_metadata.keys]

        def run() -> None:
            self._jobs.settle_all(job, self.store.load(named, self._blocks(job_metadata)))

        if named and not self._submit(run):
            self._jobs.settle_all(job, [False] * len(named))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Results since the last call. Blocks that a load missed are misses for the scheduler from now on."""
        return [self._result(job) for job in self._jobs.take()]

    def _result(self, job: Job[tuple[TransferJob, bool]]) -> JobResult:
        metadata, is_load = job.tag
        keys = list(metadata.keys)
        done = [key for key, ok in zip(keys, job.ok, strict=True) if ok]
        if is_load and len(done) < len(keys):
            self._lookup.mark_miss([key for key, ok in zip(keys, job.ok, strict=True) if not ok])
        if self._tells and done and not is_load:
            self._events.append(OffloadingEvent(done, Medium.STORAGE, removed=False, locality=self.locality))
        return JobResult(
            job_id=metadata.job_id,
            success=len(done) == len(keys),
            successful_keys=tuple(done) if is_load and done and len(done) < len(keys) else None,
            transfer_time=job.seconds,
            transfer_bytes=len(done) * self.block_size_bytes,
        )

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Which blocks were stored, since the last call. What the store evicts is not told."""
        told, self._events = self._events, []
        return told

    def has_pending_work(self) -> bool:
        """Whether jobs are under way, whose ends vLLM has to fetch."""
        return len(self._jobs) > 0

    def drain_jobs(self) -> None:
        """Wait until no transfer touches vLLM's memory; each ends by its deadline."""
        self._jobs.wait()

    def _blocks(self, job: TransferJob) -> list[memoryview]:
        """The job's places in vLLM's memory; empty, which fails, for one that lies outside of it or can't be told."""
        size, nothing = self.block_size_bytes, self._bytes[:0]
        try:
            starts = [int(chunk) * size for _, chunk in zip(job.keys, job.chunk_ids, strict=True)]
        except Exception:  # noqa: BLE001  # a job that never ends would hold the engine
            self.store.mishap("batch", len(job.keys))
            starts = [-1] * len(job.keys)
        return [self._bytes[at : at + size] if at >= 0 else nothing for at in starts]

    def _submit(self, run: Any) -> bool:
        try:
            self._threads.submit(run)
        except RuntimeError:  # shut down
            return False
        return True

    # -- the rest

    def shutdown(self) -> None:
        """End, with what is queued written, for 5 s at most."""
        self._lookup.shutdown()
        self._threads.shutdown(wait=True)
        self.store.close()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {
            _metric(name): OffloadingCounterMetadata(documentation=text) for name, text in METRICS.items()
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call."""
        counts = self.store.stats()
        stats = OffloadingConnectorStats()
        for name in METRICS:
            new = counts.get(name, 0) - self._told[name]
            if new:
                self._told[name] += new
                stats.increase_counter(_metric(name), new)
        return stats


def _locality(name: str) -> Locality:
    try:
        return Locality(name)
    except ValueError:
        expected = " or ".join(one.value for one in Locality)
        raise ValueError(f"locality must be a Locality, {expected}, not {name!r}") from None


def _metric(name: str) -> str:
    return f"vllm:kv_offload_kvcs_{name}_blocks"


def _space(spec: Any, version: str, block_bytes: int) -> KeySpace:
    """What vLLM's own file tier tells caches apart by, and what decides a block's bytes besides.

    Its own: model, dtype, tokens of a block, groups of layers, parallel layout. It leaves out the order of a block's
    dimensions, which attention backends differ in.
    """
    mapper = FileMapper.from_offloading_spec(
        root_dir="", offloading_spec=spec, blocks_per_file=spec.blocks_per_chunk, parallel_agnostic=True
    )
    run = mapper.get_run_config()
    told = run | {"kv_cache_layout": spec.config.kv_cache_layout, "block_bytes": block_bytes}
    text = json.dumps(told, sort_keys=True, separators=(",", ":"))
    return KeySpace(
        model=run["model_name"],
        version=version,
        engine="vllm",
        dtype=run["dtype"],
        layout=hashlib.sha256(text.encode()).hexdigest()[:16],
        rank=f"r{mapper.rank}",
    )
