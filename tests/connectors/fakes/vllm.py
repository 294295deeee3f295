"""vLLM's tier interface, and the parts of its manager that a tier is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any


class LookupResult(Enum):
    MISS = 1
    HIT = 2
    RETRY = 3


class Medium(Enum):
    STORAGE = "STORAGE"


class Locality(Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


@dataclass
class OffloadingEvent:
    keys: list[bytes]
    medium: Medium
    removed: bool
    locality: Locality | None = None


@dataclass
class ReqContext:
    req_id: str


@dataclass
class TransferJob:
    job_id: int
    keys: list[bytes]
    chunk_ids: list[int]
    is_promotion: bool = False
    req_context: Any = None


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager:
    def __init__(self, spec: Any, view: memoryview, tier_type: str, detector: Any = None) -> None:
        assert view.strides
        self.block_size_bytes = view.strides[0]
        self.locality: Locality | None = None


class AsyncLookupManager(ABC):
    """Answers at the end of the step, in the caller's thread."""

    def __init__(self, tier_type: str) -> None:
        self.answers: dict[bytes, bool] = {}
        self.asked: list[bytes] = []

    def lookup(self, key: bytes, context: ReqContext) -> bool | None:
        if key not in self.answers and key not in self.asked:
            self.asked.append(key)
        return self.answers.get(key)

    def flush(self) -> None:
        asked, self.asked = self.asked, []
        self.answers.update(zip(asked, self.batch_lookup(asked, None), strict=True))

    @abstractmethod
    def batch_lookup(self, keys: list[bytes], context: Any) -> Any:
        """The tier's own."""

    def mark_miss(self, keys: list[bytes]) -> None:
        self.answers.update((key, False) for key in keys if key in self.answers)

    def cleanup(self, request: str) -> None:
        self.answers.clear()

    def shutdown(self) -> None:
        self.asked.clear()


class FileMapper:
    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields, self.rank = fields, 0

    @classmethod
    def from_offloading_spec(cls, root_dir: str, offloading_spec: Any, **options: Any) -> FileMapper:
        return cls(offloading_spec.fields)

    def get_run_config(self) -> dict[str, Any]:
        return self.fields


class OffloadingConnectorStats:
    def __init__(self) -> None:
        self.counters: dict[str, int] = {}

    def increase_counter(self, name: str, by: int) -> None:
        self.counters[name] = self.counters.get(name, 0) + by


VLLM = {
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": {
        "OffloadingConnectorStats": OffloadingConnectorStats
    },
    "vllm.v1.kv_offload.base": {
        "Locality": Locality,
        "LookupResult": LookupResult,
        "Medium": Medium,
        "OffloadingCounterMetadata": SimpleNamespace,
        "OffloadingEvent": OffloadingEvent,
        "RequestOffloadingContext": SimpleNamespace,
        "get_offload_block_hash": lambda key: key[:-4],
        "get_offload_group_idx": lambda key: int.from_bytes(key[-4:], "big"),
    },
    "vllm.v1.kv_offload.file_mapper": {"FileMapper": FileMapper},
    "vllm.v1.kv_offload.tiering.async_lookup": {"AsyncLookupManager": AsyncLookupManager},
    "vllm.v1.kv_offload.tiering.base": {
        "JobResult": JobResult,
        "SecondaryTierManager": SecondaryTierManager,
        "TransferJob": TransferJob,
    },
}
