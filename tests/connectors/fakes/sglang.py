"""SGLang's storage interface, and a host pool."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tests.connectors.fakes.torch import BFLOAT16


class HiCacheStorage:
    """The base class; what a backend doesn't override isn't called in the tests."""


@dataclass
class HiCacheStorageConfig:
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    model_name: str | None = "org/model"
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None

    @property
    def is_storage_writer(self) -> bool:
        return not self.is_mla_model or self.tp_rank == self.dcp_rank


class PoolName(str, Enum):  # noqa: UP042  # as SGLang has it
    KV = "kv"
    MAMBA = "mamba"
    INDEXER = "indexer"
    DRAFT = "draft"

    def __str__(self) -> str:
        return str(self.value)


class PoolHitPolicy(str, Enum):  # noqa: UP042
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: Any = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    block_pages: int = 0
    group_pages: int = 0


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class HostPool:
    """A host pool of `pages` pages; each has `buffers` pieces that lie apart, as keys and values do."""

    def __init__(
        self, pages: int, page_size: int = 4, buffers: int = 2, size: int = 256, layout: str = "page_first"
    ) -> None:
        self.page_size, self.layout, self.dtype = page_size, layout, BFLOAT16
        self._buffers, self._size, self.memory = buffers, size, bytearray(pages * buffers * size)

    def get_page_buffer_meta(self, indices: list[int]) -> tuple[list[int], list[int]]:
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        plane = len(self.memory) // self._buffers
        pages = [index // self.page_size for index in indices[:: self.page_size]]
        places = [base + b * plane + page * self._size for page in pages for b in range(self._buffers)]
        return places, [self._size] * len(places)

    def indices(self, *pages: int) -> list[int]:
        return [page * self.page_size + i for page in pages for i in range(self.page_size)]

    def page(self, page: int) -> bytes:
        plane, start = len(self.memory) // self._buffers, page * self._size
        return b"".join(self.memory[b * plane + start :][: self._size] for b in range(self._buffers))


SGLANG = {
    "sglang.srt.mem_cache.hicache_storage": {
        "HiCacheStorage": HiCacheStorage,
        "HiCacheStorageConfig": HiCacheStorageConfig,
        "PoolHitPolicy": PoolHitPolicy,
        "PoolName": PoolName,
        "PoolTransfer": PoolTransfer,
        "PoolTransferResult": PoolTransferResult,
    },
    "sglang.srt.observability.metrics_collector": {"StorageMetrics": StorageMetrics},
}
