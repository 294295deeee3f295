"""What an ideal cache would hit on a trace: LRU as the product does it, and the best that any cache could do.

Both work on requests of block ids in prefix order, on a cache of `room` blocks of one size. A block counts as
a hit within the leading run of a request that is cached: an engine can use nothing behind the first gap.
Pure functions: no store, no clock.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvcsfs.bench.measure import PAGE


def charged_bytes(size: int) -> int:
    """What a store is charged for a value of `size` bytes: rounded up to 4096, and a footer of 4096."""
    return math.ceil(size / PAGE) * PAGE + PAGE


def ideal_lru(requests: Iterable[Sequence[int]], room: int) -> int:
    """Hits of an LRU that evicts one block at a time, exactly when it must.

    A request reads its leading run and writes the rest. Within each of these two batches the last block is
    touched first, so that of one prefix chain the tail goes before the head that it needs.
    """
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for blocks in requests:
        run = len(list(itertools.takewhile(cached.__contains__, blocks)))
        hits += run
        for block in reversed(blocks[:run]):
            cached.move_to_end(block)
        for block in reversed(blocks[run:]):
            cached[block] = None
            cached.move_to_end(block)
            if len(cached) > room:
                cached.popitem(last=False)
    return hits


def belady(requests: Sequence[Sequence[int]], room: int) -> int:
    """Hits of the best cache possible, which knows the future and need not keep what it is given.

    It keeps the blocks that are needed soonest (Belady's MIN); of those needed at the same time, the nearest
    to the head of their chain, so that what is cached is always usable.
    """
    following = _next_uses(requests)
    cached: dict[int, tuple[float, int]] = {}
    furthest: list[
        tuple[float, int, int]
    ] = []  # heap of (-next use, -position, block); stale ones are passed over
    hits = 0
    for blocks, uses in zip(requests, following, strict=True):
        hits += len(list(itertools.takewhile(cached.__contains__, blocks)))
        for position, (block, use) in enumerate(zip(blocks, uses, strict=True)):
            cached[block] = (-use, -position)
            heapq.heappush(furthest, (-use, -position, block))
        while len(cached) > room:
            use, position, block = heapq.heappop(furthest)
            if cached.get(block) == (use, position):
                del cached[block]
    return hits


def _next_uses(requests: Sequence[Sequence[int]]) -> list[list[float]]:
    """For each block of each request, the number of the next request that has it; infinity if none has."""
    seen: dict[int, float] = {}
    following: list[list[float]] = []
    for number in range(len(requests) - 1, -1, -1):
        following.append([seen.get(block, math.inf) for block in requests[number]])
        seen.update(dict.fromkeys(requests[number], float(number)))
    return following[::-1]
