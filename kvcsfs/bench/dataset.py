"""The keys and values that a benchmark works on, and the calls it makes on them."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvcs import KvcsError, KvcsLowLevelClient, KvcsTimeoutError, LLGetItemOpt, LLPutItem
from kvcsfs.bench.errors import BenchError
from kvcsfs.bench.measure import Sample
from kvcsfs.config import format_size


@dataclass(frozen=True)
class Dataset:
    """`count` keys below `prefix`, whose values have fixed sizes drawn from `sizes` (bytes, weight)."""

    prefix: str
    sizes: tuple[tuple[int, float], ...]
    count: int

    @property
    def label(self) -> str:
        """Its value size, or the range of them, for people."""
        smallest, largest = min(self.sizes)[0], max(self.sizes)[0]
        name = format_size(largest)
        return name if smallest == largest else f"{format_size(smallest)}-{name}"

    @property
    def largest(self) -> int:
        """Bytes of the largest value."""
        return max(self.sizes)[0]

    @functools.cached_property
    def keys(self) -> list[str]:
        """All keys, in order."""
        return [f"{self.prefix}/{i:010d}" for i in range(self.count)]

    @functools.cached_property
    def value_sizes(self) -> list[int]:
        """The size of each value; the same in every run."""
        sizes, weights = zip(*self.sizes, strict=True)
        return random.Random(0).choices(sizes, weights, k=self.count)  # noqa: S311 - a load, not a secret


class Caller:
    """One caller's calls: batches of keys that follow one another, like a prefix's blocks, in own buffers.

    A call never raises for what the store does: each key that failed is counted.
    """

    def __init__(
        self, client: KvcsLowLevelClient, dataset: Dataset, buffers: Sequence[memoryview], number: int = 0
    ) -> None:
        self.client = client
        self._keys, self._sizes = dataset.keys, dataset.value_sizes
        self.buffers = buffers
        self._random = random.Random(number)  # noqa: S311 - a load, not a secret
        self._next = self._random.randrange(dataset.count)

    def call(self, op: str, read_share: float) -> Sample:
        """One batch of `op`, at a random place for reads and at the next one for writes."""
        count = len(self.buffers)
        if op == "mixed":
            op = "get" if self._random.random() < read_share else "put"
        if op == "put":
            first = self._next
            self._next = (first + count) % len(self._keys)
        else:
            first = self._random.randrange(len(self._keys))
        indexes = [i % len(self._keys) for i in range(first, first + count)]
        return {"get": self.get, "put": self.put, "query": self.query}[op](indexes)

    def get(self, indexes: Sequence[int]) -> Sample:
        """Read values into the buffers."""
        items = [LLGetItemOpt(key=self._keys[i]) for i in indexes]
        buffers = self.buffers[: len(items)]
        return _sample(lambda: self.client.ll_batch_get_into_items(items, buffers), len(items), missed=0)

    def put(self, indexes: Sequence[int]) -> Sample:
        """Write values from the buffers."""
        views = [b[: self._sizes[i]] for b, i in zip(self.buffers, indexes, strict=False)]
        items = [LLPutItem(key=self._keys[i], value=v) for i, v in zip(indexes, views, strict=True)]
        sample = _sample(lambda: self.client.ll_batch_put(items), len(items), missed=None)
        share = (sample.keys - sample.errors) / sample.keys
        return replace(sample, bytes=int(share * sum(map(len, views))))

    def query(self, indexes: Sequence[int]) -> Sample:
        """Look keys up."""
        keys = [self._keys[i] for i in indexes]
        return _sample(lambda: self.client.ll_batch_query(keys), len(keys), missed="not_found")

    def delete(self, indexes: Sequence[int]) -> Sample:
        """Delete keys; one that is absent is a miss."""
        keys = [self._keys[i] for i in indexes]
        return _sample(lambda: self.client.ll_batch_delete(keys), len(keys), missed=-errno.ENOENT)


class _HasStatus(Protocol):
    @property
    def status(self) -> int | str: ...


def _sample(call: Callable[[], Sequence[_HasStatus]], keys: int, missed: int | str | None) -> Sample:
    """Time a call and count what came of its keys; `missed` is the status of a miss, > 0 is bytes read."""
    start = time.perf_counter()
    try:
        results = call()
        seconds = time.perf_counter() - start
        statuses = [result.status for result in results]
    except KvcsError as exc:
        seconds = time.perf_counter() - start
        statuses = [-exc.errno] * keys
    failures = Counter(
        _name(s) for s in statuses if s not in {missed, "ok"} and (isinstance(s, str) or s < 0)
    )
    moved = sum(s for s in statuses if isinstance(s, int) and s > 0)
    return Sample(start, seconds, keys, moved, sum(s == missed for s in statuses), failures)


def _name(status: int | str) -> str:
    return status if isinstance(status, str) else errno.errorcode.get(-status, str(status))


def chunks(count: int, size: int) -> list[Sequence[int]]:
    """The indexes below `count` in runs of at most `size`."""
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def fill(client: KvcsLowLevelClient, dataset: Dataset, buffers: Sequence[memoryview]) -> None:
    """Store every value of the dataset, a batch as large as there are buffers.

    Raises:
        BenchError: a value could not be stored.
    """
    keys, sizes = dataset.keys, dataset.value_sizes
    for indexes in chunks(dataset.count, len(buffers)):
        items = [LLPutItem(key=keys[i], value=b[: sizes[i]]) for i, b in zip(indexes, buffers, strict=False)]
        for result in client.ll_batch_put(items):
            if result.status < 0:
                raise BenchError(f"the values to work on can't be stored: {os.strerror(-result.status)}")


def clean(client: KvcsLowLevelClient, keys: Sequence[str]) -> None:
    """Delete keys; those that are absent don't matter.

    Raises:
        BenchError: the store could not delete some; the others are gone.
    """
    left = [
        result
        for indexes in chunks(len(keys), 256)
        for result in client.ll_batch_delete([keys[i] for i in indexes])
        if result.status not in {0, -errno.ENOENT}
    ]
    if left:
        raise BenchError(f"{len(left)} keys such as {left[0].key} are left: {os.strerror(-left[0].status)}")


def reach(client: KvcsLowLevelClient) -> None:
    """See that a daemon is there, before anything that it would have to clean up.

    Raises:
        KvcsUnavailableError: it is not.
    """
    with contextlib.suppress(KvcsTimeoutError):  # a slow one is there
        client.ll_batch_query(["kvcs-bench"])
