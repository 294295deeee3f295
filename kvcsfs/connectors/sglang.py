"""SGLang: a storage backend of HiCache (`--hicache-storage-backend dynamic`).

A page is one value, read into and written out of the host pool's own memory. Keys carry all that SGLang leaves to a
backend: model, dtype, layout, page size and rank. Source: sglang 0.5.23, `srt/mem_cache/hicache_storage.py`,
`srt/managers/cache_controller.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvcsfs.connectors.engines import missing
from kvcsfs.connectors.keys import KeySpace, leading_run
from kvcsfs.connectors.memory import view_at, view_of
from kvcsfs.connectors.settings import Settings
from kvcsfs.connectors.store import Store

try:
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        HiCacheStorageConfig,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
    )
    from sglang.srt.observability.metrics_collector import StorageMetrics
except ImportError as exc:
    raise missing("sglang", "0.5.23", exc) from exc

MAX_SAMPLES = 4096  # of bandwidth, should nobody ask for them
R = TypeVar("R")


class KvcsHiCache(HiCacheStorage):
    """Its threads call concurrently; no call raises. Options `kvcs.<name>` of the extra config: see `Settings`."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        """Raises ValueError: an option that can't be used, or a model without a name."""
        extra = storage_config.extra_config or {}
        self._config = storage_config
        self._settings = Settings.take(extra, "kvcs.")
        self._store = Store(self._settings)
        # Without it the controller moves whole pages through the generic calls, with their bytes in another order.
        self._zero_copy = bool(extra.get("interface_v1"))
        self.mem_pool_host: Any = None
        self.registered_pools: dict[str, Any] = {}
        self._spaces: dict[tuple[str, bool], KeySpace] = {}
        self._samples: list[tuple[bool, int, float]] = []  # is it a load, pages, GB/s
        self._lock = threading.Lock()
        self._space(PoolName.KV, False)  # a model without a name is refused here

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool whose pages the calls without a pool name mean."""
        self.mem_pool_host = mem_pool_host
        self._spaces.clear()  # dtype and layout are known now

    # -- questions

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages are there before the first that isn't."""
        return self._guarded(lambda: self._store.match(self._keys(PoolName.KV, keys)), 0)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Which prefixes can be restored, with all pools that a hybrid model needs; one query for all of them."""
        return self._guarded(
            lambda: self._exists_v2(keys, pool_transfers or []), PoolTransferResult(0, {}, [])
        )

    def _exists_v2(self, keys: list[str], transfers: list[PoolTransfer]) -> PoolTransferResult:
        asked = [(PoolName.KV, keys)] + [(t.name, _keys_asked(t, keys)) for t in transfers]
        flat = [key for name, part in asked for key in self._keys(name, part)]
        answers = iter(self._store.exists(flat))
        found = [[next(answers) for _ in part] for _, part in asked]
        pages = leading_run(found[0])
        hits = {PoolName.KV: pages} if pages else {}
        restorable = range(1, pages + 1)
        usable = set(restorable)
        for transfer, there in zip(transfers, found[1:], strict=True):
            covered, gates = _covered(transfer, there, pages)
            if covered:
                hits[transfer.name] = max(covered)
            if gates:
                usable &= covered
        prefixes = [page for page in restorable if page in usable]
        return PoolTransferResult(prefixes[-1] if prefixes else 0, hits, prefixes)

    # -- pages, straight from and into the host pools

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Fill the pages at `host_indices`; a page that isn't there is False, and its memory undefined."""
        return self._pages(PoolName.KV, keys, host_indices, self._load)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store the pages at `host_indices`."""
        if not self._config.is_storage_writer:
            return [True] * len(keys)  # another rank writes the same bytes
        return self._pages(PoolName.KV, keys, host_indices, self._save)

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """As `batch_get_v1`, for pages of several pools."""
        return {t.name: self._pages(t.name, t.keys or [], t.host_indices, self._load) for t in transfers}

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """As `batch_set_v1`, for pages of several pools."""
        return {t.name: self._pages(t.name, t.keys or [], t.host_indices, self._save) for t in transfers}

    def _pages(
        self,
        name: str,
        keys: list[str],
        host_indices: Any,
        transfer: Callable[[list[str], list[list[memoryview]]], list[bool]],
    ) -> list[bool]:
        def run() -> list[bool]:
            named = self._keys(name, keys, pages=True)
            return transfer(named, _page_buffers(self._pool(name), host_indices, len(keys)))

        return self._guarded(run, [False] * len(keys)) if keys else []

    # -- the generic calls: one flat tensor a page

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Fill the tensor `target_location` and return it; None for a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        def run() -> list[Any]:
            loaded = self._load(
                self._keys(PoolName.KV, keys, pages=False), [view_of(t) for t in target_locations]
            )
            return [tensor if ok else None for tensor, ok in zip(target_locations, loaded, strict=True)]

        return self._guarded(run, [None] * len(keys)) if keys and target_locations else [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a tensor; whether it is there now."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        def run() -> bool:
            tensors = [value.contiguous() for value in values]  # kept until the bytes are taken
            return all(self._save(self._keys(PoolName.KV, keys, pages=False), [view_of(t) for t in tensors]))

        return self._guarded(run, False)

    # -- the rest

    def clear(self) -> bool:
        """Delete what this model and version has from SGLang, all ranks' pages."""
        return self._guarded(
            lambda: self._store.remove_below(self._space(PoolName.KV, True).engine_prefix), False
        )

    def get_stats(self) -> StorageMetrics | None:
        """Pages and GB/s of each batch since the last call; None unless storage metrics are on."""
        if not self._config.enable_storage_metrics:
            return None
        with self._lock:
            samples, self._samples = self._samples, []
        metrics = StorageMetrics()
        for is_load, pages, speed in samples:
            (metrics.prefetch_pgs if is_load else metrics.backup_pgs).append(pages)
            (metrics.prefetch_bandwidth if is_load else metrics.backup_bandwidth).append(speed)
        return metrics

    def close(self) -> None:
        """End the client. May be called again."""
        self._guarded(self._store.close, None)

    def _load(self, keys: list[str], buffers: Sequence[Any]) -> list[bool]:
        return self._timed(True, self._store.load, keys, buffers)

    def _save(self, keys: list[str], buffers: Sequence[Any]) -> list[bool]:
        return self._timed(False, self._store.save, keys, buffers)

    def _timed(
        self, is_load: bool, call: Callable[..., list[bool]], keys: list[str], buffers: Sequence[Any]
    ) -> list[bool]:
        start = time.perf_counter()
        done = call(keys, buffers)
        seconds = time.perf_counter() - start
        if self._config.enable_storage_metrics and (pages := sum(done)):
            first = buffers[0] if isinstance(buffers[0], list) else [buffers[0]]
            speed = pages * sum(map(len, first)) / seconds / 1e9
            with self._lock:
                if len(self._samples) < MAX_SAMPLES:
                    self._samples.append((is_load, pages, speed))
        return done

    def _guarded(self, call: Callable[[], R], otherwise: R) -> R:
        """The store raises nothing, but pools and their layouts may: the controller's thread must not end with it."""
        try:
            return call()
        except Exception:  # noqa: BLE001  # the engine's thread must not end with it
            self._store.mishap("batch", 1)
            return otherwise

    # -- keys

    def _pool(self, name: str) -> Any:
        return self.registered_pools.get(name) or (self.mem_pool_host if name == PoolName.KV else None)

    def _keys(self, name: str, keys: Sequence[str], pages: bool | None = None) -> list[str]:
        if pages is None:  # KV pages are where the controller's transfer calls put them
            pages = self._zero_copy or name != PoolName.KV
        space = self._space(name, pages)
        part = "" if name == PoolName.KV else f".{name}"
        return [space.key(key + part) for key in keys]

    def _space(self, name: str, pages: bool) -> KeySpace:
        try:
            return self._spaces[name, pages]
        except KeyError:
            pass
        pool = self._pool(name)
        shape = f"{getattr(pool, 'layout', 'any')}.page{getattr(pool, 'page_size', 1)}"
        space = KeySpace(
            model=self._config.model_name or "",
            version=self._settings.version,
            engine="sglang",
            dtype=str(getattr(pool, "dtype", "any")).removeprefix("torch."),
            layout=shape if pages else shape + ".flat",
            rank=self._rank(name, pool),
        )
        self._spaces[name, pages] = space
        return space

    def _rank(self, name: str, pool: Any) -> str:
        """Which part of the model: as HiCacheFile's suffixes, save that a split draft pool has keys of its own."""
        config = self._config
        sharded = (
            not config.is_mla_model
            or name == PoolName.MAMBA
            or any(base.__name__ == "MHATokenToKVPoolHost" for base in type(pool).__mro__)
        )
        parts = [f"tp{config.tp_rank}of{config.tp_size}" if sharded else "all"]
        if config.pp_size > 1:
            parts.append(f"pp{config.pp_rank}of{config.pp_size}")
        if config.attn_cp_size > 1:
            parts.append(f"cp{config.attn_cp_rank}of{config.attn_cp_size}")
        if config.dcp_size > 1:
            parts.append(
                f"dcp{config.dcp_rank}of{config.dcp_size}in{config.tp_size}page{config.logical_page_size}"
            )
        return ".".join(parts)


def _page_buffers(pool: Any, host_indices: Any, count: int) -> list[list[memoryview]]:
    """The pieces of each page, in the order in which the pool names them.

    Raises:
        ValueError: indices that aren't `count` whole pages.
    """
    if len(host_indices) != count * pool.page_size:
        raise ValueError(f"{count} pages of {pool.page_size} need as many indices, not {len(host_indices)}")
    addresses, sizes = pool.get_page_buffer_meta(host_indices)
    per_page, rest = divmod(len(addresses), count)
    if rest or not per_page:
        raise ValueError(f"{len(addresses)} buffers are no {count} pages")
    views = [view_at(address, size) for address, size in zip(addresses, sizes, strict=True)]
    return [views[at : at + per_page] for at in range(0, len(views), per_page)]


def _keys_asked(transfer: PoolTransfer, keys: list[str]) -> list[str]:
    """A pool has the KV pages' keys, save one of blocks, which names its own."""
    return list(transfer.keys or []) if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS else keys


def _covered(transfer: PoolTransfer, there: list[bool], pages: int) -> tuple[set[int], bool]:
    """The prefix lengths, of at most `pages`, that a pool allows; and whether it has a say in the KV hit."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, min(pages, leading_run(there)) + 1)), True
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        window = max(1, len(transfer.keys or ()))
        return {n for n in range(1, pages + 1) if all(there[max(0, n - window) : n])}, True
    size = max(1, transfer.group_pages)
    whole = leading_run(all(there[at : at + size]) for at in range(0, len(there) - size + 1, size))
    return {transfer.block_pages * whole} if whole else set(), False
