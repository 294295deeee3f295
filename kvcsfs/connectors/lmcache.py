"""LMCache inside an engine's process: a remote connector, and a storage plugin that needs no event loop.

A chunk is one value: LMCache's own header of shapes, dtypes and format, then the chunk's bytes, read straight into the
memory that LMCache allocates. Source: lmcache 0.5.6, `v1/storage_backend/connector/base_connector.py`,
`v1/storage_backend/abstract_backend.py`, `v1/storage_backend/remote_backend.py`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from kvcsfs.connectors.engines import missing
from kvcsfs.connectors.keys import component, leading_run
from kvcsfs.connectors.settings import Settings
from kvcsfs.connectors.store import Store

try:
    from lmcache.v1.memory_management import MemoryFormat
    from lmcache.v1.protocol import RemoteMetadata, get_remote_metadata_bytes, init_remote_metadata_info
    from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface
    from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
except ImportError as exc:
    raise missing("lmcache", "0.5.6", exc) from exc

Many: TypeAlias = list[Any]  # a method of LMCache's is called `list`


class Chunks:
    """Chunks of one LMCache engine in the store. Nothing raises."""

    def __init__(self, extra_config: dict[str, Any] | None, metadata: Any, cpu: Any) -> None:
        """`cpu`: LMCache's backend that allocates. Raises ValueError: an option `kvcs.<name>` that can't be used."""
        settings = Settings.take(extra_config or {}, "kvcs.")
        self.store, self._version, self._cpu = Store(settings), settings.version, cpu
        init_remote_metadata_info(metadata.get_num_groups())
        self._header_bytes: int = get_remote_metadata_bytes()
        self._shapes, self._dtypes = metadata.get_shapes(), metadata.get_dtypes()
        self._format = MemoryFormat.KV_MLA_FMT if metadata.use_mla else MemoryFormat.KV_2LTD

    def key(self, key: Any) -> str:
        """`model/version/lmcache/<world size>-<worker>-<dtype>/<hash>[@layer][@tags]`"""
        world, worker, chunk, dtype, *rest = key.to_string().removeprefix(f"{key.model_name}@").split("@")
        place = f"{component(key.model_name)}/{component(self._version)}/lmcache/{world}-{worker}-{component(dtype)}/"
        return place + component("@".join([chunk, *rest]))

    def match(self, keys: Sequence[Any]) -> int:
        return self.store.match([self.key(key) for key in keys])

    def remove(self, key: Any) -> bool:
        return self.store.remove([self.key(key)])[0]

    def value(self, chunk: Any) -> list[Any]:
        """A chunk as the store has it: its header, and its memory."""
        body = chunk.byte_array
        header = RemoteMetadata(len(body), chunk.get_shapes(), chunk.get_dtypes(), chunk.get_memory_format())
        return [header.serialize(), body]

    def save(self, keys: Sequence[Any], chunks: Sequence[Any]) -> None:
        """Store chunks, waiting until it is done."""
        try:
            self.store.save([self.key(key) for key in keys], [self.value(chunk) for chunk in chunks])
        except Exception:  # noqa: BLE001  # the engine's thread must not end with it
            self.store.mishap("save", len(keys))

    def load(self, keys: Sequence[Any]) -> list[Any]:
        """Read chunks into memory that LMCache allocates; None for a miss. The caller owns their references."""
        allocated: list[Any] = []
        try:
            return self._load(keys, allocated)
        except Exception:  # noqa: BLE001  # the engine's thread must not end with it
            self.store.mishap("load", len(keys))
            for chunk in allocated:
                chunk.ref_count_down()
            return [None] * len(keys)

    def _load(self, keys: Sequence[Any], allocated: list[Any]) -> list[Any]:
        """All as full chunks first, since nearly all are; those that turn out to have another shape, a second time."""
        shaped = [(self._shapes, self._dtypes, self._format)] * len(keys)
        chunks: list[Any] = [None] * len(keys)
        left = list(range(len(keys)))
        for _ in range(2):
            left = self._load_as(shaped, keys, left, chunks, allocated)
        return chunks

    def _load_as(
        self,
        shaped: list[Any],
        keys: Sequence[Any],
        places: list[int],
        chunks: list[Any],
        allocated: list[Any],
    ) -> list[int]:
        """Read the chunks at `places`, and put those that are as they were taken to be into `chunks`.

        Returns the places of the others, whose shapes are in `shaped` now.
        """
        targets: list[tuple[int, Any, bytearray]] = []
        for place in places:
            memory = self._cpu.allocate(*shaped[place])
            if memory is None:  # LMCache is out of memory: the rest are misses
                self.store.count("no_memory", len(places) - len(targets))
                break
            allocated.append(memory)
            targets.append((place, memory, bytearray(self._header_bytes)))
        read = self.store.load_up_to(
            [self.key(keys[place]) for place, _, _ in targets],
            [[header, memory.byte_array] for _, memory, header in targets],
        )
        others = []
        for (place, memory, header), size in zip(targets, read, strict=True):
            found = RemoteMetadata.deserialize(header) if size > self._header_bytes else None
            shape = found and (found.shapes, found.dtypes, found.fmt)
            if found and shape == shaped[place] and size == self._header_bytes + len(memory.byte_array):
                chunks[place] = memory
                continue
            allocated.remove(memory)
            memory.ref_count_down()
            if found and found.length == size - self._header_bytes and shape != shaped[place]:
                shaped[place] = shape
                others.append(place)
        return others


class KvcsConnector(RemoteConnector):
    """The remote connector: `remote_storage_plugins: ["kvcs"]`. Its blocking calls run beside the event loop."""

    def __init__(self, loop: Any, local_cpu_backend: Any, config: Any) -> None:
        super().__init__(local_cpu_backend.config, local_cpu_backend.metadata)
        self.chunks = Chunks(config.extra_config, local_cpu_backend.metadata, local_cpu_backend)

    async def exists(self, key: Any) -> bool:
        return await asyncio.to_thread(self.exists_sync, key)

    def exists_sync(self, key: Any) -> bool:
        return self.chunks.match([key]) == 1

    async def get(self, key: Any) -> Any:
        return (await self.batched_get([key]))[0]

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    async def list(self) -> Many:
        """Nothing: the store's keys don't turn back into LMCache's. `kvcsfs ls` lists them."""
        return []

    async def close(self) -> None:
        await asyncio.to_thread(self.chunks.store.close)

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Many) -> Many:
        return await asyncio.to_thread(self.chunks.load, keys)

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Many, memory_objs: Many) -> None:
        """Store chunks. Their references are given back by LMCache's wrapper, `InstrumentedRemoteConnector`."""
        await asyncio.to_thread(self.chunks.save, keys, memory_objs)

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Many) -> int:
        return self.chunks.match(keys)

    async def batched_async_contains(self, lookup_id: str, keys: Many, pin: bool = False) -> int:
        return await asyncio.to_thread(self.chunks.match, keys)

    async def batched_get_non_blocking(self, lookup_id: str, keys: Many) -> Many:
        return _leading(await self.batched_get(keys))

    def remove_sync(self, key: Any) -> bool:
        return self.chunks.remove(key)


class KvcsBackend(StoragePluginInterface):
    """The storage plugin: `storage_plugins: ["kvcs"]`. Stores from a queue that holds the chunks' references."""

    def __init__(
        self,
        dst_device: str = "cpu",
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: Any = None,
    ) -> None:
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        self.chunks = Chunks(config.extra_config, metadata, local_cpu_backend)
        self._putting: set[Any] = set()
        self._lock = threading.Lock()

    def contains(self, key: Any, pin: bool = False) -> bool:
        return self.chunks.match([key]) == 1

    def batched_contains(self, keys: list[Any], pin: bool = False) -> int:
        return self.chunks.match(keys)

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        return await asyncio.to_thread(self.chunks.match, keys)

    def exists_in_put_tasks(self, key: Any) -> bool:
        with self._lock:
            return key in self._putting

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> None:
        """Queue the chunks; one that doesn't fit into the queue is dropped and counted."""
        for key, chunk in zip(keys, objs, strict=True):
            with self._lock:
                if key in self._putting:
                    continue
                self._putting.add(key)
            chunk.ref_count_up()
            if not self._queue(key, chunk, on_complete_callback):
                self._put_ended(key, chunk)

    def _queue(self, key: Any, chunk: Any, callback: Callable[[Any], None] | None) -> bool:
        def stored(ok: bool) -> None:
            self._put_ended(key, chunk)
            if ok and callback is not None:
                callback(key)

        try:
            return self.chunks.store.save_later(self.chunks.key(key), self.chunks.value(chunk), stored)
        except Exception:  # noqa: BLE001  # the engine's thread must not end with it
            self.chunks.store.mishap("save", 1)
            return False

    def _put_ended(self, key: Any, chunk: Any) -> None:
        with self._lock:
            self._putting.discard(key)
        chunk.ref_count_down()

    def get_blocking(self, key: Any) -> Any:
        return self.chunks.load([key])[0]

    def batched_get_blocking(self, keys: list[Any]) -> list[Any]:
        return self.chunks.load(keys)

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[Any], transfer_spec: Any = None
    ) -> list[Any]:
        return _leading(await asyncio.to_thread(self.chunks.load, keys))

    def pin(self, key: Any) -> bool:
        """Nothing to do: a value that is being read can't be torn by an eviction, and one that is gone is a miss."""
        return True

    unpin = pin

    def remove(self, key: Any, force: bool = True) -> bool:
        return self.chunks.remove(key)

    def touch_cache(self) -> None:
        """Nothing to do: each read tells the store what is used."""

    def get_allocator_backend(self) -> Any:
        return self.local_cpu_backend

    def close(self) -> None:
        self.chunks.store.close()


def _leading(chunks: list[Any]) -> list[Any]:
    """The chunks before the first miss; the references of those after it are given back."""
    run = leading_run(chunk is not None for chunk in chunks)
    for chunk in chunks[run:]:
        if chunk is not None:
            chunk.ref_count_down()
    return chunks[:run]
