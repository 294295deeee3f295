"""Small stand-ins for the engines' modules, with what the connectors use of them and nothing else.

The real ones are used in tests/engines; these let the connectors' own logic run where no engine is installed.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any


@contextmanager
def connector(name: str, modules: Mapping[str, Mapping[str, Any]]) -> Iterator[Any]:
    """The module `kvcsfs.connectors.<name>`, imported with fake modules in place of its engine's."""
    full = f"kvcsfs.connectors.{name}"
    made: dict[str, ModuleType] = {}
    for path, contents in modules.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):  # the packages that it lies in
            package = ".".join(parts[:end])
            made.setdefault(package, ModuleType(package))
        made[path].__dict__.update(contents)
    before = {module: sys.modules.pop(module, None) for module in (full, *made)}
    sys.modules.update(made)
    try:
        yield importlib.import_module(full)
    finally:
        for module, old in before.items():
            sys.modules.pop(module, None)
            if old is not None:
                sys.modules[module] = old


# -- torch and transformers


@dataclass(frozen=True)
class Dtype:
    name: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.name}"


BFLOAT16, FLOAT16, FLOAT32 = Dtype("bfloat16", 2), Dtype("float16", 2), Dtype("float32", 4)


class Tensor:
    """A contiguous tensor of bytes: enough to hand its memory around."""

    def __init__(self, shape: tuple[int, ...], dtype: Dtype, data: bytes | None = None) -> None:
        self.shape, self.dtype, self.device = shape, dtype, SimpleNamespace(type="cpu")
        self.memory = bytearray(self.numel() * dtype.itemsize) if data is None else bytearray(data)
        self.strided = False

    def numel(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count

    def element_size(self) -> int:
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def is_contiguous(self) -> bool:
        return not self.strided

    def contiguous(self) -> Tensor:
        return self if not self.strided else Tensor(self.shape, self.dtype, bytes(self.memory))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """The first tokens of [1, heads, tokens, dimension]."""
        *_, tokens = index
        _, heads, length, dimension = self.shape
        row, kept = dimension * self.dtype.itemsize, len(range(length)[tokens])
        data = b"".join(self.memory[h * length * row :][: kept * row] for h in range(heads))
        return Tensor((1, heads, kept, dimension), self.dtype, data)


class DynamicCache:
    def __init__(self) -> None:
        self.layers: list[Any] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> None:
        assert layer == len(self.layers)
        self.layers.append(SimpleNamespace(keys=keys, values=values, is_sliding=False))

    def get_seq_length(self) -> int:
        return int(self.layers[0].keys.shape[2]) if self.layers else 0


def empty(shape: tuple[int, ...], dtype: Dtype) -> Tensor:
    return Tensor(shape, dtype)


TRANSFORMERS = {"torch": {"empty": empty}, "transformers": {"DynamicCache": DynamicCache}}


# -- SGLang


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
