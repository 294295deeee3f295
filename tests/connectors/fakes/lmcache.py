"""LMCache's memory and keys, its storage interface, and that of its L2 adapters."""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, Self

from tests.connectors.fakes.torch import BFLOAT16, FLOAT16, FLOAT32, Dtype, Tensor


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
