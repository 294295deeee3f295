"""`kvcs-bench compare`: the same work at the limit, here, and in other stores, in turns, in one run."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvcsfs.bench.errors import BenchError
from kvcsfs.bench.measure import touched_buffers
from kvcsfs.bench.output import as_table
from kvcsfs.bench.peers.files import files
from kvcsfs.bench.peers.job import FULL_BATCHES, QUERY_ROUNDS, Job, MissingPeerError, Peer, Turn, Work
from kvcsfs.bench.peers.kvcs import kvcsfs
from kvcsfs.bench.peers.limit import limit
from kvcsfs.bench.peers.lmcache import lmcache
from kvcsfs.bench.peers.lmdb import lmdb
from kvcsfs.bench.peers.mooncake import mooncake
from kvcsfs.bench.peers.redis import redis
from kvcsfs.config import format_size, parse_size
from kvcsfs.progress import Progress

PEERS: dict[str, Peer] = {
    "limit": limit,
    "kvcsfs": kvcsfs,
    "files": files,
    "redis": redis,
    "lmdb": lmdb,
    "lmcache": lmcache,
    "mooncake": mooncake,
}
DEFAULT_WORKS = "get:4MiBx128,get:64KiBx256,put:4MiBx128,put:64KiBx256,query:4KiBx256"
STAMP_BYTES = 8


def parse_work(text: str) -> Work:
    """The work of "get:4MiBx128". Raises ValueError with what would be right."""
    match = re.fullmatch(r"(get|put|query):(.+)x(\d+)", text)
    if not match:
        raise ValueError(
            f'{text!r}: expected "OP:SIZExCOUNT" such as "get:4MiBx128", OP one of get, put, query'
        )
    work = Work(match[1], parse_size(match[2]), int(match[3]))
    if work.size < STAMP_BYTES or work.count < 1:
        raise ValueError(f"{text!r}: expected values of {STAMP_BYTES} bytes or more, and one key or more")
    return work


def compare(
    directory: Path, works: Sequence[Work], peers: Sequence[str], turns: int, workers: int
) -> dict[str, Any]:
    """The machine, and for each work a list of contestants with their times, below files in `directory`."""
    figures = []
    machine = {"kernel": platform.release(), "cores": os.cpu_count(), "load_at_start": os.getloadavg()[0]}
    with ThreadPoolExecutor(workers) as threads, Progress(len(works) * turns) as bar:
        for work in works:
            with touched_buffers(work.count, work.size) as buffers:
                times = _contest(Job(work, directory, workers, buffers, threads), peers, turns, bar)
            figures.append(
                {
                    "op": work.op,
                    "size_bytes": work.size,
                    "keys": work.count,
                    "contestants": _ratios(work, times),
                }
            )
    return {"machine": machine, "workers": workers, "works": figures}


def _contest(job: Job, peers: Sequence[str], turns: int, bar: Progress) -> dict[str, list[float]]:
    """The seconds of each turn of each contestant, one after the other, so that noise meets all alike."""
    contestants: dict[str, Turn] = {}
    with ExitStack() as stack:
        for name in peers:
            own = job.directory / name
            own.mkdir()
            stack.callback(shutil.rmtree, own)
            _stamp(job)
            try:
                contestants |= stack.enter_context(PEERS[name](dataclasses.replace(job, directory=own)))
            except MissingPeerError as exc:
                print(f"kvcs-bench: {job.work.op}: without {name}: {exc.message}", file=sys.stderr)
        # Puts go on until every cache is full, and has evicted once.
        warm_up = FULL_BATCHES + 2 if job.work.op == "put" else 1
        for name, contestant in contestants.items():
            for turn in range(warm_up):
                contestant.prepare(turn)
                _warm(job, name, contestant, turn)
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for turn in range(warm_up, warm_up + turns):
            bar.step(f"{job.work.op} {format_size(job.work.size)} x {job.work.count}")
            for name, contestant in contestants.items():
                contestant.prepare(turn)
                start = time.perf_counter()
                contestant.run(turn)
                times[name].append(time.perf_counter() - start)
    return times


def _stamp(job: Job) -> None:
    """Mark each buffer with its place, to be stored as the values that a get is checked against."""
    for i, buffer in enumerate(job.buffers):
        buffer[:STAMP_BYTES] = i.to_bytes(STAMP_BYTES, "little")


def _warm(job: Job, name: str, contestant: Turn, turn: int) -> None:
    """One untimed turn; a get has to bring each value to its own buffer.

    Raises:
        BenchError: it did not, so its times would mean nothing.
    """
    if job.work.op == "get":
        for buffer in job.buffers:
            buffer[:STAMP_BYTES] = b"\xff" * STAMP_BYTES
    contestant.run(turn)
    for i, buffer in enumerate(job.buffers):
        if buffer[:STAMP_BYTES] != i.to_bytes(STAMP_BYTES, "little"):
            raise BenchError(f"{name}: a get brought another value than was stored")


def _ratios(work: Work, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Each contestant's median time, and its speed as a share of the limit's and of kvcsfs's by turns."""
    rounds = QUERY_ROUNDS if work.op == "query" else 1
    rows = []
    for name, seconds in times.items():
        median = statistics.median(seconds)
        rows.append(
            {
                "name": name,
                "median_ms": median * 1e3 / rounds,
                "gb_per_s": None if work.op == "query" else work.batch_bytes / median / 1e9,
                "keys_per_s": work.count * rounds / median,
                "of_limit": _share(times.get("limit"), seconds),
                "of_kvcsfs": _share(times.get("kvcsfs"), seconds),
                "turns_ms": [s * 1e3 / rounds for s in seconds],
            }
        )
    return rows


def _share(reference: Sequence[float] | None, seconds: Sequence[float]) -> float | None:
    if reference is None:
        return None
    return statistics.median(r / s for r, s in zip(reference, seconds, strict=True))


def as_text(figures: dict[str, Any]) -> str:
    """A table a work, for people."""
    machine = figures["machine"]
    parts = [f"{machine['cores']} cores, load {machine['load_at_start']:.1f}, {figures['workers']} threads"]
    for work in figures["works"]:
        rows = [{k: v for k, v in row.items() if k != "turns_ms"} for row in work["contestants"]]
        parts.append(f"{work['op']} {format_size(work['size_bytes'])} x {work['keys']}\n{as_table(rows)}")
    return "\n\n".join(parts)
