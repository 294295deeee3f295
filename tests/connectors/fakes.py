"""Small stand-ins for the engines' modules, with what the connectors use of them and nothing else.

The real ones are used in tests/engines; these let the connectors' own logic run where no engine is installed.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, Self


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
        self.copied_tokens = 0  # the real one joins what it is given to what it has, in fresh memory

    def update(self, keys: Tensor, values: Tensor, layer: int) -> None:
        assert layer == len(self.layers)
        self.copied_tokens += keys.shape[2]
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


# -- LMCache


class MemoryFormat(Enum):
    KV_2LTD = 1
    KV_MLA_FMT = 2


class MemoryObj:
    """A chunk's memory, with the references that somebody holds to it. A ctypes array, as LMCache has it."""

    def __init__(
        self, shapes: list[Any], dtypes: list[Dtype], fmt: MemoryFormat = MemoryFormat.KV_2LTD
    ) -> None:
        self.shapes, self.dtypes, self.fmt, self.references = shapes, dtypes, fmt, 1
        size = sum(Tensor(tuple(s), d).numel() * d.itemsize for s, d in zip(shapes, dtypes, strict=True))
        self.byte_array = memoryview((ctypes.c_ubyte * size)())

    def get_shapes(self) -> list[Any]:
        return self.shapes

    def get_dtypes(self) -> list[Dtype]:
        return self.dtypes

    def get_memory_format(self) -> MemoryFormat:
        return self.fmt

    def get_size(self) -> int:
        return len(self.byte_array)

    def ref_count_up(self) -> None:
        self.references += 1

    def ref_count_down(self) -> None:
        self.references -= 1
        assert self.references >= 0

    def fill(self, data: bytes) -> MemoryObj:
        self.byte_array.cast("B")[:] = data
        return self

    def content(self) -> bytes:
        return bytes(self.byte_array)


@dataclass
class RemoteMetadata:
    """A header of 48 bytes: length, format, dtype, and three dimensions."""

    length: int
    shapes: list[Any]
    dtypes: list[Dtype]
    fmt: MemoryFormat

    def serialize(self) -> bytes:
        names = [BFLOAT16, FLOAT16, FLOAT32]
        return struct.pack("<6q", self.length, self.fmt.value, names.index(self.dtypes[0]), *self.shapes[0])

    @staticmethod
    def deserialize(data: bytes) -> RemoteMetadata:
        length, fmt, dtype, *shape = struct.unpack("<6q", data)
        return RemoteMetadata(length, [shape], [[BFLOAT16, FLOAT16, FLOAT32][dtype]], MemoryFormat(fmt))


class CpuBackend:
    """LMCache's allocating backend: counts what it gave, and has no memory when told so."""

    def __init__(self, shape: list[int], use_mla: bool = False) -> None:
        self.config = None
        self.metadata = SimpleNamespace(
            get_num_groups=lambda: 1,
            get_shapes=lambda: [shape],
            get_dtypes=lambda: [BFLOAT16],
            use_mla=use_mla,
        )
        self.given: list[MemoryObj] = []
        self.left = 1 << 30

    def allocate(self, shapes: list[Any], dtypes: list[Dtype], fmt: MemoryFormat) -> MemoryObj | None:
        if not self.left:
            return None
        self.left -= 1
        self.given.append(MemoryObj(shapes, dtypes, fmt))
        return self.given[-1]

    def held(self) -> int:
        """How many chunks somebody holds still."""
        return sum(memory.references > 0 for memory in self.given)


@dataclass(frozen=True)
class CacheEngineKey:
    chunk_hash: int
    model_name: str = "org/model"
    world_size: int = 2
    worker_id: int = 1
    dtype: str = "bfloat16"
    tail: str = ""

    def to_string(self) -> str:
        parts = (self.model_name, self.world_size, self.worker_id, f"{self.chunk_hash:x}", self.dtype)
        return "@".join(map(str, parts)) + self.tail


class RemoteConnector:
    def __init__(self, config: Any, metadata: Any) -> None:
        assert metadata is not None


class StoragePluginInterface:
    def __init__(
        self, dst_device: str, config: Any, metadata: Any, local_cpu_backend: Any, loop: Any
    ) -> None:
        self.local_cpu_backend = local_cpu_backend


LMCACHE = {
    "lmcache.v1.memory_management": {"MemoryFormat": MemoryFormat},
    "lmcache.v1.protocol": {
        "RemoteMetadata": RemoteMetadata,
        "get_remote_metadata_bytes": lambda: 48,
        "init_remote_metadata_info": lambda groups: None,
    },
    "lmcache.v1.storage_backend.abstract_backend": {"StoragePluginInterface": StoragePluginInterface},
    "lmcache.v1.storage_backend.connector.base_connector": {"RemoteConnector": RemoteConnector},
}


@dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str = "org/model"
    kv_rank: int = 0x02010201
    object_group_id: int = 0
    cache_salt: str = ""


class Bitmap:
    def __init__(self, size: int) -> None:
        self.bits = [False] * size

    def set(self, place: int) -> None:
        self.bits[place] = True


class L2StoreResult(int):
    def __new__(cls, success: bool, bytes_transferred: int) -> Self:
        return super().__new__(cls, bytes_transferred if success else -1)


class L2AdapterInterface:
    def __init__(self) -> None:
        self.told: list[tuple[str, list[ObjectKey], list[int]]] = []

    def _notify_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.told.append(("stored", keys, sizes))

    def _notify_keys_deleted(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.told.append(("deleted", keys, sizes))


class EventNotifier:
    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)

    def notify(self) -> None:
        os.eventfd_write(self._fd, 1)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


LMCACHE_L2 = {
    "lmcache.lmcache_native": {"Bitmap": Bitmap},
    "lmcache.v1.distributed.internal_api": {"L2StoreResult": L2StoreResult},
    "lmcache.v1.distributed.l2_adapters.base": {"L2AdapterInterface": L2AdapterInterface},
    "lmcache.v1.platform.event_notifier": {"create_event_notifier": EventNotifier},
}


# -- vLLM


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
