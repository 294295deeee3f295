"""Puts off the critical path: a bounded queue that a thread of its own empties in batches."""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvcsfs.errors import KvcsError
from kvcsfs.sdk.buffers import check_source, size_of
from kvcsfs.sdk.client import KvcsLowLevelClient
from kvcsfs.sdk.deadline import check_seconds, wait_seconds
from kvcsfs.sdk.results import Buffer, LLBatchOptions, LLPutItem

log = logging.getLogger("kvcs")

BATCH_ITEMS = 256

OnDone = Callable[[int], None]


@dataclass(slots=True)
class _Entry:
    item: LLPutItem
    size: int
    on_done: OnDone | None


class WriteBackQueue:
    """Drops what does not fit: a cache may lose a write, its user may not wait.

    Invariant, under `_changed`: `_bytes` and `_items` count what is queued or being put, within the limits.
    """

    def __init__(
        self,
        client: KvcsLowLevelClient,
        max_bytes: int = 1 << 30,
        max_items: int = 1024,
        deadline_s: float | None = 30.0,
        opts: LLBatchOptions | None = None,
    ) -> None:
        """`deadline_s`, `opts`: of each put. Raises ValueError, TypeError: a limit below 1, or what no put takes."""
        if max_bytes < 1 or max_items < 1:
            raise ValueError(f"max_bytes and max_items must be at least 1, not {max_bytes} and {max_items}")
        if deadline_s is not None:
            check_seconds("deadline_s", deadline_s)
        if opts is not None and not isinstance(opts, LLBatchOptions):
            raise TypeError(f"opts must be an LLBatchOptions, not {type(opts).__name__}")
        self._client, self._max_bytes, self._max_items, self._deadline_s = (
            client,
            max_bytes,
            max_items,
            deadline_s,
        )
        self._opts = opts
        self._changed = threading.Condition()
        self._queue: deque[_Entry] = deque()
        self._bytes = self._items = self._ok = self._dropped = 0
        self._failed: Counter[str] = Counter()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvcs-writeback", daemon=True)
        self._thread.start()

    def submit(self, key: str, value: Buffer | Sequence[Buffer], on_done: OnDone | None = None) -> bool:
        """Queue a put and return at once; False if it was dropped, because the queue is full, closed or a parent's.

        The value's memory is the queue's until `on_done(status)` was called, in the queue's thread: 0 or -errno.
        Raises TypeError, ValueError: a key or value that can't be put.
        """
        if not isinstance(key, str):
            raise TypeError(f"a key must be a str, not {type(key).__name__}")
        size = size_of(check_source(value, "value"))
        with self._changed:
            full = self._items >= self._max_items or self._bytes + size > self._max_bytes
            if full or self._closed or not self._thread.is_alive():
                self._dropped += 1
                return False
            self._queue.append(_Entry(LLPutItem(key, value), size, on_done))
            self._bytes += size
            self._items += 1
            self._changed.notify_all()
        return True

    def stats(self) -> dict[str, Any]:
        """Counts: ok, failed by errno, dropped, and what waits now in items and bytes."""
        with self._changed:
            return {
                "ok": self._ok,
                "failed": dict(self._failed),
                "dropped": self._dropped,
                "queued_items": self._items,
                "queued_bytes": self._bytes,
            }

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is queued or being put; False if that took too long."""
        with self._changed:
            # a thread that didn't come along through a fork won't empty it
            self._changed.wait_for(
                lambda: not self._items or not self._thread.is_alive(), wait_seconds(timeout_s)
            )
            return not self._items

    def close(self, timeout_s: float = 5.0) -> None:
        """Take no more, put what is queued, and drop what is left after so many seconds with -ECANCELED."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.flush(timeout_s)
        with self._changed:
            left = list(self._queue)
            self._queue.clear()
            self._dropped += len(left)
        self._done(left, [-errno.ECANCELED] * len(left), count=False)
        if threading.current_thread() is not self._thread:
            self._thread.join(wait_seconds(timeout_s))

    def _run(self) -> None:
        while batch := self._next_batch():
            self._done(batch, self._put(batch), count=True)

    def _put(self, batch: list[_Entry]) -> list[int]:
        try:
            results = self._client.ll_batch_put([entry.item for entry in batch], self._deadline_s, self._opts)
            return [result.status for result in results]
        except KvcsError as exc:  # the client was closed
            return [-exc.errno] * len(batch)
        except Exception:  # without this thread every owner would wait for `on_done` forever
            if len(batch) > 1:  # memory that its owner has freed: the others' values are not lost with it
                return [status for entry in batch for status in self._put([entry])]
            log.exception("the value of key %r was lost", batch[0].item.key)
            return [-errno.EIO]

    def _next_batch(self) -> list[_Entry]:
        """What is queued, up to a request's worth; empty once closed and drained."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            return [self._queue.popleft() for _ in range(min(len(self._queue), BATCH_ITEMS))]

    def _done(self, batch: list[_Entry], statuses: list[int], count: bool) -> None:
        for entry, status in zip(batch, statuses, strict=True):
            if entry.on_done is not None:
                try:
                    entry.on_done(status)
                except KeyboardInterrupt:  # of the main thread, which is in `close`
                    raise
                except BaseException:  # a cancelled task's as well: the other owners wait for this thread
                    log.exception("on_done of key %r failed", entry.item.key)
        with self._changed:
            for entry, status in zip(batch, statuses, strict=True):
                self._bytes -= entry.size
                self._items -= 1
                if count and status == 0:
                    self._ok += 1
                elif count:
                    self._failed[errno.errorcode.get(-status, str(-status))] += 1
            self._changed.notify_all()
