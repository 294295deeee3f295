"""The store as an engine's threads may use it: nothing raises, every failure is a miss, and all of them are counted."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from kvcsfs import wire
from kvcsfs.connectors.settings import Settings
from kvcsfs.control import Control, default_socket
from kvcsfs.errors import KvcsTimeoutError
from kvcsfs.sdk import KvcsLowLevelClient, LLBatchOptions, LLGetItemOpt, LLPutItem, WriteBackQueue

log = logging.getLogger("kvcs.connectors")

MAX_KEY_BYTES = 1024
WARN_SECONDS = 60.0

R = TypeVar("R")
# A buffer, or a list or tuple of buffers that are one value's pieces: whatever memory an engine has.
Value: TypeAlias = Any


class Store:
    """One client with its counts. Any number of threads may use it."""

    def __init__(self, settings: Settings) -> None:
        """Connects at the first call. Raises ValueError, TypeError: settings that can't be used."""
        self.settings = settings
        self.client = KvcsLowLevelClient(
            settings.socket or None,
            max_value_size=wire.MAX_VALUE_BYTES,  # the SDK's 4 MiB is less than a block of a large model
            max_key_size=MAX_KEY_BYTES,
            get_workers=settings.get_workers,
            set_workers=settings.set_workers,
            default_deadline_s=settings.deadline_s,
            connect_timeout_s=min(settings.deadline_s or 5.0, 5.0),
            verify_reads=settings.verify_reads,
        )
        self._renew = LLBatchOptions(settings.mountpoint_index, renew=True)
        # A block's key names its content: what is there already need not be written again.
        self._keep = LLBatchOptions(settings.mountpoint_index, if_exists="keep")
        self._plain = LLBatchOptions(settings.mountpoint_index)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._resume = self._warn_again = 0.0
        self._queue: WriteBackQueue | None = None
        self._closed = False

    # -- questions

    def sizes(self, keys: Sequence[str]) -> list[int]:
        """Bytes of each key's value, 0 where there is none; one round trip."""
        found = self._attempt("query", keys, lambda: self.client.ll_batch_query(keys, opts=self._plain))
        return [result.total_size for result in found] if found else [0] * len(keys)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which keys hold a value; one round trip."""
        return [size > 0 for size in self.sizes(keys)]

    def match(self, keys: Sequence[str]) -> int:
        """How many keys hold a value before the first that doesn't; one round trip."""
        return self._attempt("query", keys, lambda: self.client.ll_batch_match(keys, opts=self._plain)) or 0

    def touch(self, keys: Sequence[str]) -> None:
        """Have the store take the keys for used."""
        self._attempt("touch", keys, lambda: self.client.ll_batch_query(keys, opts=self._renew))

    # -- values

    def load(self, keys: Sequence[str], buffers: Sequence[Value]) -> list[bool]:
        """Read values into buffers, or lists of buffers; True where the value filled its buffer exactly.

        A buffer of a miss may hold anything afterwards.
        """
        sizes = [size_of(buffer) for buffer in buffers]
        got = self.load_up_to(keys, buffers)
        wrong = sum(0 < status != size for status, size in zip(got, sizes, strict=True))
        if wrong:
            self.count("wrong_size", wrong)
        return [status == size > 0 for status, size in zip(got, sizes, strict=True)]

    def load_up_to(self, keys: Sequence[str], buffers: Sequence[Value]) -> list[int]:
        """Read values that may be shorter than their buffers: bytes read of each, 0 for a miss."""
        items = [LLGetItemOpt(key) for key in keys]
        results = self._attempt(
            "load", keys, lambda: self.client.ll_batch_get_into_items(items, buffers, opts=self._plain)
        )
        return self._bytes_read("load", results, len(keys))

    def fetch(self, key: str) -> bytearray | None:
        """Read one value of unknown size."""
        results = self._attempt(
            "load", [key], lambda: self.client.ll_batch_get_items([LLGetItemOpt(key)], opts=self._plain)
        )
        return results[0].data if results and self._bytes_read("load", results, 1)[0] else None

    def save(self, keys: Sequence[str], values: Sequence[Value]) -> list[bool]:
        """Store values, waiting until it is done; a key that holds one already keeps it."""
        items = [LLPutItem(key, value) for key, value in zip(keys, values, strict=True)]
        deadline_s = self.settings.store_deadline_s
        results = self._attempt("save", keys, lambda: self.client.ll_batch_put(items, deadline_s, self._keep))
        statuses = [result.status for result in results or ()]
        self._look_at("save", statuses)
        return [status == 0 for status in statuses] or [False] * len(keys)

    def save_later(self, key: str, value: Value, on_done: Callable[[bool], None]) -> bool:
        """Queue a value and return at once; its memory is the store's until `on_done(stored)`. False: dropped."""
        if self._queue is None:
            with self._lock:
                if self._closed:  # an engine's last threads may outlive its connector
                    self._counts["dropped"] += 1
                    return False
                self._queue = self._queue or self._new_queue()
        try:
            return self._queue.submit(key, value, lambda status: self._saved(status, on_done))
        except Exception as exc:  # noqa: BLE001  memory that can't be written must not end the engine's thread
            self._failed("save", exc, 1)
            return False

    def remove(self, keys: Sequence[str]) -> list[bool]:
        """Delete keys; True where there was a value."""
        results = self._attempt("remove", keys, lambda: self.client.ll_batch_delete(keys, opts=self._plain))
        return [result.status == 0 for result in results] if results else [False] * len(keys)

    def remove_below(self, prefix: str) -> bool:
        """Delete all keys that start with `prefix`; whether that was done."""

        def remove() -> wire.EvictReply:
            with Control(self.settings.socket or default_socket()) as control:
                return control.ask(wire.Remove(2, self.settings.mountpoint_index, prefix), wire.EvictReply)

        return self._attempt("remove", [prefix], remove) is not None

    # -- the rest

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is queued; False if that took too long."""
        return self._queue is None or self._queue.flush(timeout_s)

    def count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by

    def mishap(self, op: str, keys: int) -> None:
        """In an exception handler: count and log what the engine's own objects raised, as `errors`."""
        self.count("errors")
        self.note(op, keys, "a bug, or an engine that this connector does not know", exc_info=True)

    def note(self, op: str, keys: int, why: str, *, exc_info: bool = False) -> None:
        """Count, and say it once a minute: an engine asks hundreds of times a second."""
        self.count(f"{op}_failed", keys)
        now = time.monotonic()
        if now >= self._warn_again:
            self._warn_again = now + WARN_SECONDS
            text = "%s of %d keys failed, the engine goes on without: %s"
            log.warning(text, op, keys, why, exc_info=exc_info)

    def stats(self) -> dict[str, int]:
        """Counts since the start: hits, misses, saved, dropped, wrong_size, errors, and `<operation>_failed`."""
        queue = self._queue.stats() if self._queue else {}
        with self._lock:
            counts = dict(self._counts)
        counts["dropped"] = counts.get("dropped", 0) + queue.get("dropped", 0)
        counts["queued_bytes"] = queue.get("queued_bytes", 0)
        return counts

    def close(self) -> None:
        """Write what is queued, for 5 s at most, and end. May be called again."""
        with self._lock:
            self._closed = True
        if self._queue is not None:
            self._queue.close()
        self.client.close()

    def _new_queue(self) -> WriteBackQueue:
        settings = self.settings
        return WriteBackQueue(
            self.client, settings.queue_bytes, settings.queue_items, settings.store_deadline_s, self._keep
        )

    def _saved(self, status: int, on_done: Callable[[bool], None]) -> None:
        if status:
            self._look_at("save", [status])
        else:  # as that counts it; called for each value, while others are written
            self.count("saved")
        on_done(status == 0)

    def _attempt(self, op: str, keys: Sequence[str], call: Callable[[], R]) -> R | None:
        """The call's result; None if it failed, or if the store is being left alone."""
        if not keys or time.monotonic() < self._resume:
            self.count(f"{op}_failed", len(keys))
            return None
        try:
            return call()
        except Exception as exc:  # noqa: BLE001  the engine's thread would end with it
            self._failed(op, exc, len(keys))
            return None

    def _bytes_read(self, op: str, results: Sequence[Any] | None, asked: int) -> list[int]:
        statuses = [result.status for result in results or ()] or [0] * asked
        if results:
            hits = sum(status > 0 for status in statuses)
            self.count("hits", hits)
            self.count("misses", statuses.count(0))
            self._look_at(op, statuses)
        return [max(status, 0) for status in statuses]

    def _look_at(self, op: str, statuses: Sequence[int]) -> None:
        """Count the failures of single keys, and keep away from a store that lets reads wait."""
        failed = [status for status in statuses if status < 0]
        if op == "save":  # much to write is no reason to stop reading
            self.count("saved", len(statuses) - len(failed))
        elif -errno.ETIMEDOUT in failed:
            self._resume = time.monotonic() + self.settings.pause_s
        if failed:
            self.note(op, len(failed), errno.errorcode.get(-failed[0], str(failed[0])))

    def _failed(self, op: str, exc: Exception, keys: int) -> None:
        if isinstance(exc, KvcsTimeoutError):
            self._resume = time.monotonic() + self.settings.pause_s
        self.note(op, keys, f"{type(exc).__name__}: {exc}")


def size_of(buffer: Value) -> int:
    """Bytes of a buffer, or of all buffers of a list or tuple."""
    if isinstance(buffer, list | tuple):
        return sum(memoryview(piece).nbytes for piece in buffer)
    return memoryview(buffer).nbytes
