"""Run as a script: an SDK client that puts, gets and deletes until its stdin ends, and knows what it must find.

Arguments: socket, file of the daemon's life, seed, mountpoint, "kept" or "evicted". The keys are its own alone. The
last line of stdout is JSON: counts, and what was wrong, with the last calls for that key.
"""

from __future__ import annotations

import json
import random
import select
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path

from kvcsfs.errors import KvcsTimeoutError, KvcsUnavailableError
from kvcsfs.sdk import KvcsLowLevelClient, LLBatchOptions, LLGetItemOpt, LLPutItem

KEYS = 40
SIZES = (900, 4096, 20_000, 70_000)
REMEMBERED = 20  # calls of a key


class Load:
    """`allowed` has by key the versions that a get may find; None is a miss."""

    def __init__(
        self, client: KvcsLowLevelClient, life: Path, seed: int, mountpoint: int, evicts: bool
    ) -> None:
        self.client, self.life, self.evicts = client, life, evicts
        self.rng = random.Random(seed)
        self.options = LLBatchOptions(mountpoint_index=mountpoint)
        self.names = [f"load{seed}/{i}" for i in range(KEYS)]
        self.allowed: dict[str, set[int | None]] = {name: {None} for name in self.names}
        self.version = 0
        self.counts: Counter[str] = Counter()
        self.calls: dict[str, deque[str]] = {name: deque(maxlen=REMEMBERED) for name in self.names}
        self.wrong: list[str] = []

    def note(self, call: str, outcomes: Iterable[tuple[str, object]], begun: float) -> None:
        """Remember a call, with the times of the clock that the test's own record of lives has."""
        when = f"{begun:.4f}..{time.monotonic():.4f} life {self.life.read_text()}: {call}"
        for name, outcome in outcomes:
            self.calls[name].append(f"{when} {outcome}")

    def complain(self, name: str, what: str) -> None:
        self.wrong.append("\n  ".join([f"{name}: {what}", *self.calls[name]]))

    def value(self, name: str, version: int) -> bytes:
        size = SIZES[version % len(SIZES)] + version % 13
        return (f"{name} {version};".encode() * (size // 8))[:size]

    def put(self) -> None:
        names = self.rng.sample(self.names, self.rng.randint(1, 8))
        versions = {name: self.version + i for i, name in enumerate(names, 1)}
        self.version += len(names)
        begun = time.monotonic()
        results = self.client.ll_batch_put(
            [LLPutItem(name, self.value(name, v)) for name, v in versions.items()], opts=self.options
        )
        self.note("put", [(r.key, f"{versions[r.key]}: {r.status}") for r in results], begun)
        for result in results:
            if result.status == 0:
                self.allowed[result.key] = {versions[result.key]}
            else:
                self.allowed[result.key].add(versions[result.key])
            self.counts[f"put {result.status}"] += 1

    def delete(self) -> None:
        names, begun = self.rng.sample(self.names, 2), time.monotonic()
        results = self.client.ll_batch_delete(names, opts=self.options)
        self.note("delete", [(r.key, r.status) for r in results], begun)
        for result in results:
            if result.status == 0:
                self.allowed[result.key] = {None}
            else:
                self.allowed[result.key].add(None)
            self.counts[f"delete {result.status}"] += 1

    def get(self, names: list[str]) -> None:
        before, begun = self.life.read_text(), time.monotonic()
        try:
            results = self.client.ll_batch_get_items([LLGetItemOpt(n) for n in names], opts=self.options)
        except (KvcsUnavailableError, KvcsTimeoutError) as exc:
            self.counts["get failed"] += 1
            self.note("get", [(name, type(exc).__name__) for name in names], begun)
            return
        steady = before == self.life.read_text() != "down"  # else a miss may be that of a recovery
        self.note(f"get since life {before}:", [(r.key, r.status) for r in results], begun)
        for result in results:
            if result.data is not None:
                self.found(result.key, bytes(result.data))
            elif result.status:
                self.complain(result.key, f"get {result.status}")
            elif steady:
                self.missed(result.key)

    def found(self, name: str, value: bytes) -> None:
        versions = [v for v in self.allowed[name] if v is not None and self.value(name, v) == value]
        self.counts["hits"] += 1
        if not versions:
            self.complain(name, f"{value[:40]!r}, expected one of {self.allowed[name]}")
        self.allowed[name] = set(versions)

    def missed(self, name: str) -> None:
        self.counts["misses"] += 1
        if None not in self.allowed[name] and not self.evicts:
            self.complain(name, f"missing, expected {self.allowed[name]}")
        self.allowed[name] = {None}  # and it must not come back

    def step(self) -> None:
        kind = self.rng.random()
        if kind < 0.45:
            self.put()
        elif kind < 0.9:
            self.get(self.rng.sample(self.names, 6))
        else:
            self.delete()
        if self.life.read_text() == "down":
            time.sleep(0.005)


def main(socket: str, life: Path, seed: int, mountpoint: int, kind: str) -> None:
    with KvcsLowLevelClient(socket, default_deadline_s=20) as client:
        load = Load(client, life, seed, mountpoint, kind == "evicted")
        while not load.wrong and not select.select([sys.stdin], [], [], 0)[0]:
            load.step()
        load.get(load.names)
    print(json.dumps({"counts": load.counts, "wrong": load.wrong}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
