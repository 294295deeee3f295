"""Run as a script: an engine, and a seeded mix of everything that changes a store, one operation after another.

Arguments: data directory, log, seed, operations. It stops cleanly at the end, if nothing kills it before. WORKLOAD_KILL
is `acknowledged:n` or `written:n`: after the n-th operation, or when the n-th put has written half of its data.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import trio

from kvcsfs.config import Config, MountpointConfig
from kvcsfs.engine.engine import Engine, Opened
from kvcsfs.engine.session import Session
from kvcsfs.errors import KvcsError
from tests.faults.record import Log, Record, value_of, version_of
from tests.stores import checksum, write

CAPACITY = 400 << 10
NAMES = [f"{folder}/{i}" for folder in "ab" for i in range(14)]


class Workload:
    """One life of a store."""

    def __init__(self, engine: Engine, log: Log, record: Record, rng: random.Random) -> None:
        self.engine, self.log, self.rng = engine, log, rng
        self.version = record.version
        self.versions: dict[str, int | None] = {}
        self.gone: set[str] = set()
        self.passes: Counter[str] = Counter()
        self.session: Session = engine.session(0, quota_share=0)
        self.leases: list[Opened] = []
        engine.watchers.append(self.watch)

    def watch(self, index: int, names: Collection[str]) -> None:
        get = self.engine.volumes[0].catalog.index.get
        gone = [name for name in names if get(name) is None]
        if gone:
            self.log.write(gone=gone)
            self.gone.update(gone)

    async def run(self, operations: int) -> None:
        await self.settle()
        kinds = [self.put] * 6 + [self.file] * 2 + [self.get] * 4 + [self.delete] * 3 + [self.rename] * 2
        kinds += [self.evict, self.checkpoint]
        for number in range(operations):
            await self.rng.choice(kinds)()
            self.passed("acknowledged")
            if number == operations // 2:
                await self.checkpoint()
        for opened in self.leases:
            self.engine.release(self.session, opened.lease)

    async def settle(self) -> None:
        """Begin with what is there: after a crash an operation may have been done or not."""
        found = await self.engine.open_many(self.session, 0, NAMES, renew=False)
        hits = [name for name, entry in zip(NAMES, found.entries, strict=True) if entry is not None]
        values = [os.pread(fd, 1 << 20, 0) for fd in found.fds]
        sizes = [entry.size for entry in found.entries if entry is not None]
        versions = [version_of(v[:size]) for v, size in zip(values, sizes, strict=True)]
        self.engine.release(self.session, found.lease)
        self.end({**dict.fromkeys(NAMES), **dict(zip(hits, versions, strict=True))})

    def passed(self, what: str) -> None:
        """Die here if so told."""
        self.passes[what] += 1
        if os.environ.get("WORKLOAD_KILL") == f"{what}:{self.passes[what]}":
            os.kill(os.getpid(), signal.SIGKILL)

    def begin(self, changes: dict[str, int | None]) -> None:
        self.gone.clear()
        self.log.write(begin=changes)

    def end(self, changes: dict[str, int | None]) -> None:
        """The operation is acknowledged: what left meanwhile is gone, what it changed stands."""
        state: dict[str, int | None] = dict.fromkeys(self.gone) | changes
        self.versions.update(state)
        self.log.write(end=state)

    def next(self) -> int:
        self.version += 1
        return self.version

    # -- operations

    async def put(self) -> None:
        names = self.rng.sample(NAMES, self.rng.randint(1, 4))
        changes = {name: self.next() for name in names}
        self.begin(dict(changes))
        values = {name: value_of(version) for name, version in changes.items()}
        sizes = [len(v) for v in values.values()]
        staged = await self.engine.reserve_many(self.session, 0, names, sizes)
        done: list[str] = []
        for name, outcome in zip(names, staged, strict=True):
            if not isinstance(outcome, KvcsError):
                os.pwrite(outcome.fd, values[name][: len(values[name]) // 2], 0)
                self.passed("written")
                write(outcome, values[name])
                done.append(name)
        kept = [s for s in staged if not isinstance(s, KvcsError)]
        sums = [checksum(values[name]) for name in done]
        results = await self.engine.commit_many(self.session, [s.token for s in kept], sums)
        # One that failed leaves the key as it was; the record keeps both as allowed.
        self.end({name: changes[name] for name, r in zip(done, results, strict=True) if r is None})

    async def file(self) -> None:
        name, version = self.rng.choice(NAMES), self.next()
        value = value_of(version)
        self.begin({name: version})
        try:
            staged = await self.engine.stage_file(self.session, 0, name)
            await self.engine.grow(self.session, staged, len(value) + 9000)
        except KvcsError:
            self.end({})
            return
        os.pwrite(staged.fd, value + b"written ahead", 0)
        await self.engine.commit_file(self.session, staged, name, len(value), checksum(value))
        self.end({name: version})

    async def get(self) -> None:
        """Hold values for a while. Recovery orders those of one batch as they were put: they are asked for so."""
        found = await self.engine.query_many(0, self.rng.sample(NAMES, 3))
        held = sorted((e for e in found if e is not None), key=lambda e: e.generation)
        opened = await self.engine.open_many(self.session, 0, [e.key for e in held])
        if opened.lease:
            self.leases.append(opened)
        while len(self.leases) > 2:
            self.engine.release(self.session, self.leases.pop(0).lease)

    async def delete(self) -> None:
        names = self.rng.sample(NAMES, 2)
        for opened in self.leases:  # what somebody reads is voided in place
            names += [e.key for e in opened.entries[:1] if e is not None and e.key not in names]
        self.begin(dict.fromkeys(names))
        await self.engine.delete_many(0, names)
        self.end(dict.fromkeys(names))

    async def rename(self) -> None:
        old, new = self.rng.sample(NAMES, 2)
        version = self.versions.get(old)
        if version is not None:
            self.begin({old: None, new: version})
            await self.engine.rename(0, old, new)
            # It counts as put now, which tells in a batch that it was used in before: it is used alone.
            await self.engine.query_many(0, [new], renew=True)
            self.end({old: None, new: version})

    async def evict(self) -> None:
        prefix = self.rng.choice(["a/1", "b/1"])
        self.begin({})
        await self.engine.evict(0, prefix, 0)
        self.end({})

    async def checkpoint(self) -> None:
        order = [e.key for e in self.engine.volumes[0].catalog.lru]
        self.log.write(ordering=order)
        await self.engine.volumes[0].upkeep.checkpoint()
        self.log.write(order=order)


async def main(data: Path, log: Path, seed: int, operations: int) -> None:
    durability = os.environ.get("WORKLOAD_DURABILITY", "none")
    engine = Engine(Config((MountpointConfig(data, CAPACITY, 0.0, 0.0, durability=durability),)))
    async with engine.running():
        await engine.volumes.recovered()
        workload = Workload(engine, Log(log), Record(log), random.Random(seed))
        await workload.run(operations)
        engine.check()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
