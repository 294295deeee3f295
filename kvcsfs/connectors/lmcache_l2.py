"""LMCache's own server: an L2 adapter (`--l2-adapter '{"type": "plugin", ...}'`).

Stores come from a queue, lookups and loads from threads; each kind tells of its end by an event descriptor. Loads go
into the buffers that LMCache gives. Source: lmcache 0.5.6, `v1/distributed/l2_adapters/base.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Lock
from typing import Any

from kvcsfs.connectors.engines import missing
from kvcsfs.connectors.jobs import Job, Jobs
from kvcsfs.connectors.keys import KeySpace
from kvcsfs.connectors.settings import Settings
from kvcsfs.connectors.store import Store

try:
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.platform.event_notifier import create_event_notifier
except ImportError as exc:
    raise missing("lmcache", "0.5.6", exc) from exc

SHAPE_BYTES = 16


@lru_cache(maxsize=4096)
def _space(model: str, version: str, group: int, rank: int) -> KeySpace:
    # dtype and shapes: LMCache's keys don't carry them, so that each value ends with their hash
    return KeySpace(model, version, "lmcache-l2", "any", f"group{group}", f"{rank:08x}")


def _shape(memory: Any) -> bytes:
    """A hash of what an object's bytes mean; another dtype of the same size must not be taken for this one."""
    return _hash(tuple(map(tuple, memory.get_shapes())), tuple(memory.get_dtypes()))


@lru_cache(maxsize=256)  # all objects of a layout have the same, but for a prompt's last one
def _hash(shapes: tuple[Any, ...], dtypes: tuple[Any, ...]) -> bytes:
    text = repr(([list(s) for s in shapes], [str(d) for d in dtypes]))
    return hashlib.blake2b(text.encode(), digest_size=SHAPE_BYTES).digest()


class _Kind:
    """One kind of task: its jobs, its event descriptor, and results that wait to be asked for."""

    def __init__(self) -> None:
        self.event = create_event_notifier()
        self.jobs: Jobs[int] = Jobs(self._notify)
        self._results: dict[int, list[bool]] = {}
        self._lock = Lock()
        self._closed = False

    def _notify(self) -> None:
        with self._lock:
            if not self._closed:  # a job may end later, when the descriptor is another's
                self.event.notify()

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self.event.close()

    def result(self, task: int) -> Any:
        """A bitmap, once; None while the task is under way."""
        with self._lock:
            self._results.update((job.tag, job.ok) for job in self.jobs.take())
            ok = self._results.pop(task, None)
        if ok is None:
            return None
        bitmap = Bitmap(len(ok))
        for place, hit in enumerate(ok):
            if hit:
                bitmap.set(place)
        return bitmap


class KvcsL2Adapter(L2AdapterInterface):
    """Nothing raises but the constructor. `adapter_params`: see `Settings`."""

    def __init__(self, adapter_params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        """Raises ValueError: an option that can't be used."""
        settings = Settings.take(adapter_params)
        super().__init__()
        self._version = settings.version
        self._store = Store(settings)
        self._threads = ThreadPoolExecutor(max(2, settings.load_threads), thread_name_prefix="kvcs-l2")
        self._stores, self._lookups, self._loads = _Kind(), _Kind(), _Kind()
        self._objects: dict[int, tuple[list[Any], list[int]]] = {}  # of store tasks: keys and sizes
        self._lock, self._last = Lock(), 0

    def get_store_event_fd(self) -> int:
        return int(self._stores.event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookups.event.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._loads.event.fileno())

    # -- stores

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Queue objects; a task with one that was dropped or failed has failed."""
        task = self._new_task()
        self._objects[task] = (keys, [memory.get_size() for memory in objects])
        job = self._stores.jobs.start(task, len(keys))
        for place, (key, memory) in enumerate(zip(keys, objects, strict=True)):
            if not self._queue(job, place, key, memory):
                self._stores.jobs.settle(job, place, ok=False)
        return task

    def _queue(self, job: Job[int], place: int, key: Any, memory: Any) -> bool:
        try:
            value = [memory.byte_array, _shape(memory)]
        except Exception:  # noqa: BLE001  # the engine's thread must not end with it
            self._store.mishap("save", 1)
            return False
        return self._store.save_later(
            self._key(key), value, lambda ok: self._stores.jobs.settle(job, place, ok)
        )

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        results = {}
        for job in self._stores.jobs.take():
            keys, sizes = self._objects.pop(job.tag)
            stored = [place for place, ok in enumerate(job.ok) if ok]
            if stored:
                self._notify_keys_stored([keys[i] for i in stored], [sizes[i] for i in stored])
            results[job.tag] = L2StoreResult(len(stored) == len(keys), sum(sizes[i] for i in stored))
        return results

    # -- lookups

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Any) -> int:
        """Ask for keys. Nothing is locked: a value that is evicted before it is loaded is a miss then."""
        return self._submit(self._lookups, keys, lambda: self._store.exists([self._key(key) for key in keys]))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._lookups.result(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing to do, as nothing is locked."""

    # -- loads

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Fill the objects' memory; an object that isn't filled to its end is a miss."""

        def load() -> list[bool]:
            shapes = [bytearray(SHAPE_BYTES) for _ in keys]
            buffers = [[memory.byte_array, shape] for memory, shape in zip(objects, shapes, strict=True)]
            filled = self._store.load([self._key(key) for key in keys], buffers)
            wanted = zip(filled, objects, shapes, strict=True)
            return [ok and shape == _shape(memory) for ok, memory, shape in wanted]

        return self._submit(self._loads, keys, load)

    def query_load_result(self, task_id: int) -> Any:
        return self._loads.result(task_id)

    def _submit(self, kind: _Kind, keys: Sequence[Any], work: Callable[[], list[bool]]) -> int:
        task = self._new_task()
        job = kind.jobs.start(task, len(keys))

        def run() -> None:
            try:
                ok = work()
            except Exception:  # noqa: BLE001  # the engine's thread must not end with it
                self._store.mishap("load", len(keys))
                ok = [False] * len(keys)
            kind.jobs.settle_all(job, ok)

        if keys:
            try:
                self._threads.submit(run)
            except RuntimeError:  # closed: everything is a miss
                kind.jobs.settle_all(job, [False] * len(keys))
        return task

    # -- the rest

    def delete(self, keys: list[Any]) -> None:
        """Delete objects, and tell the listeners which there were."""
        named = [self._key(key) for key in keys]
        sizes = self._store.sizes(named)
        gone = self._store.remove(named)
        deleted = [
            (key, size - SHAPE_BYTES) for key, size, ok in zip(keys, sizes, gone, strict=True) if ok and size
        ]
        if deleted:
            self._notify_keys_deleted([key for key, _ in deleted], [size for _, size in deleted])

    def report_status(self) -> dict[str, Any]:
        """Counts of the store, and whether loads and stores are under way."""
        return {
            "is_healthy": True,
            "type": "KvcsL2Adapter",
            "stores_under_way": len(self._stores.jobs),
            "loads_under_way": len(self._loads.jobs),
            **self._store.stats(),
        }

    def close(self) -> None:
        """End, with what is queued written, for 5 s at most."""
        self._threads.shutdown(wait=True)
        self._store.close()
        for kind in (self._stores, self._lookups, self._loads):
            kind.close()

    def _new_task(self) -> int:
        with self._lock:
            self._last += 1
            return self._last

    def _key(self, key: Any) -> str:
        space = _space(key.model_name, self._version, key.object_group_id, key.kv_rank)
        block = key.chunk_hash.hex()
        return space.key(f"{block}@{key.cache_salt}" if key.cache_salt else block)
