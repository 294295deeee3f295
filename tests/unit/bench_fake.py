"""A store in a dict with the SDK's methods, for the benchmark's own logic."""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Self, cast

from kvcs import KvcsLowLevelClient, LLGetItemOpt, LLPutItem


class Status:
    """One key's result: what every result type of the SDK has."""

    def __init__(self, status: int | str, key: str) -> None:
        self.status, self.key = status, key


class FakeStore:
    """Values by key, least recently used first; evicts beyond `room` values. `on_call` sees each op."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.values: OrderedDict[str, bytes] = OrderedDict()
        self.room = room
        self.lock = threading.Lock()
        self.on_call: Callable[[str], None] = lambda _op: None
        self.put_status = 0


class FakeClient:
    """The batch calls of KvcsLowLevelClient on a FakeStore, with the product's order of recency."""

    def __init__(self, store: FakeStore) -> None:
        self.store = store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ll_batch_query(self, keys: Sequence[str]) -> list[Status]:
        self.store.on_call("query")
        return [Status("ok" if key in self.store.values else "not_found", key) for key in keys]

    def ll_batch_get_into_items(
        self, items: Sequence[LLGetItemOpt], buffers: Sequence[memoryview]
    ) -> list[Status]:
        self.store.on_call("get")
        assert len(items) == len(buffers)
        with self.store.lock:
            values = [self.store.values.get(item.key, b"") for item in items]
            for item in reversed(items):
                if item.key in self.store.values:
                    self.store.values.move_to_end(item.key)
        for value, buffer in zip(values, buffers, strict=True):
            buffer[: len(value)] = value
        return [Status(len(value), item.key) for value, item in zip(values, items, strict=True)]

    def ll_batch_put(self, items: Sequence[LLPutItem]) -> list[Status]:
        self.store.on_call("put")
        if self.store.put_status == 0:
            with self.store.lock:
                for item in reversed(items):
                    self.store.values[item.key] = bytes(cast("memoryview", item.value))  # never in segments
                    self.store.values.move_to_end(item.key)
                    if len(self.store.values) > self.store.room:
                        self.store.values.popitem(last=False)
        return [Status(self.store.put_status, item.key) for item in items]

    def ll_batch_delete(self, keys: Sequence[str]) -> list[Status]:
        self.store.on_call("delete")
        with self.store.lock:
            found = [self.store.values.pop(key, None) is not None for key in keys]
        return [Status(0 if f else -errno.ENOENT, key) for f, key in zip(found, keys, strict=True)]


def fake_client(store: FakeStore) -> KvcsLowLevelClient:
    """A FakeClient, for what asks for the SDK's class."""
    return cast("KvcsLowLevelClient", FakeClient(store))
