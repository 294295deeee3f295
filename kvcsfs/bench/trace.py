"""`kvcs-bench trace`: replays the requests of a recorded load as an engine would make them."""

from __future__ import annotations

import gzip
import itertools
import random
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from kvcs import KvcsLowLevelClient, KvcsTimeoutError, LLGetItemOpt, LLPutItem
from kvcsfs.bench.dataset import clean, reach
from kvcsfs.bench.errors import BenchError
from kvcsfs.bench.interrupts import uninterrupted
from kvcsfs.bench.measure import latency, touched_buffers
from kvcsfs.bench.output import as_table
from kvcsfs.bench.policies import belady, charged_bytes, ideal_lru
from kvcsfs.config import format_size
from kvcsfs.errors import ConfigError
from kvcsfs.progress import Progress

Result = TypeVar("Result")

STAMP_BYTES = 8
SHIFTS = 64  # so many different bodies; the stamps at both ends tell the blocks of one body apart


class Request(msgspec.Struct, frozen=True):
    """One line of a trace: milliseconds since its start, and the ids of the prompt's prefix blocks."""

    timestamp: float
    hash_ids: list[int]


def read_trace(file: Path, limit: int = 0) -> list[Request]:
    """The requests of a trace, at most `limit` of them unless that is 0. JSON lines, gzipped or not.

    Raises:
        ConfigError: one line that names the file, the line and what was expected.
    """
    requests: list[Request] = []
    decoder = msgspec.json.Decoder(Request)
    try:
        data = file.read_bytes()
        lines = (gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data).splitlines()
    except (OSError, EOFError, zlib.error) as exc:
        raise ConfigError(f"{file}: can't be read: {getattr(exc, 'strerror', None) or exc}") from exc
    for number, line in enumerate(lines, 1):
        if limit and len(requests) == limit:
            break
        if line.strip():
            try:
                requests.append(decoder.decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
                raise ConfigError(f"{file}:{number}: {str(exc).replace('`', '')}") from exc
    if not requests:
        raise ConfigError(f"{file}: holds no request, expected one JSON object a line")
    return requests


class Values:
    """The value of each block id, so that what is read can be told from any other block's value."""

    def __init__(self, size: int) -> None:
        if size < 2 * STAMP_BYTES + 1:
            raise ConfigError(
                f"--value-size: expected at least {2 * STAMP_BYTES + 1} bytes, to hold a block's marks"
            )
        self._size = size
        self._base = memoryview(random.Random(0).randbytes(size + SHIFTS))  # noqa: S311 - a load, not a secret
        self._digests = [xxhash.xxh3_64_intdigest(self._body(block)) for block in range(SHIFTS)]

    def _body(self, block: int) -> memoryview:
        return self._base[block % SHIFTS :][: self._size - 2 * STAMP_BYTES]

    def write(self, block: int, out: memoryview) -> None:
        """Fill `out`, of the value's size, with the value of a block."""
        stamp = _stamp(block)
        out[:STAMP_BYTES] = out[-STAMP_BYTES:] = stamp
        out[STAMP_BYTES:-STAMP_BYTES] = self._body(block)

    def right(self, block: int, value: memoryview) -> bool:
        """Whether `value` is the whole value of a block."""
        stamp = _stamp(block)
        return (
            len(value) == self._size
            and value[:STAMP_BYTES] == stamp
            and value[-STAMP_BYTES:] == stamp
            and xxhash.xxh3_64_intdigest(value[STAMP_BYTES:-STAMP_BYTES]) == self._digests[block % SHIFTS]
        )


def _stamp(block: int) -> bytes:
    return (block % (1 << 8 * STAMP_BYTES)).to_bytes(STAMP_BYTES, "little")


@dataclass
class Counts:
    """What a replay saw. Times of calls in seconds, by op; `late_s`: how far it fell behind."""

    requests: int = 0
    blocks: int = 0
    hits: int = 0
    written: int = 0
    errors: int = 0
    late_s: float = 0.0
    wall_s: float = 0.0
    calls: dict[str, list[float]] = field(
        default_factory=lambda: {"query": [], "get": [], "put": [], "request": []}
    )


class Replay:
    """One engine, one request at a time: look up the leading run, read it, write the rest."""

    def __init__(self, client: KvcsLowLevelClient, prefix: str, value_size: int) -> None:
        self._client, self._prefix, self._size = client, f"{prefix}/{uuid.uuid4().hex[:12]}", value_size
        self._values = Values(value_size)
        self.counts = Counts()

    def run(self, requests: Sequence[Request], speed: float) -> Counts:
        """Replay at `speed` times the trace's timing, 0 for as fast as possible; deletes its keys at the end.

        Raises:
            BenchError: the store gave a value that isn't the block's.
        """
        reach(self._client)
        longest = max(len(r.hash_ids) or 1 for r in requests)  # a trace of empty prompts has a place as well
        try:
            with touched_buffers(longest, self._size) as buffers, Progress(len(requests)) as bar:
                start = time.perf_counter()
                for request in requests:
                    bar.step(f"requests, {self.counts.hits} hits")
                    if speed:
                        self._wait_until(start + (request.timestamp - requests[0].timestamp) / 1e3 / speed)
                    self._request(request.hash_ids, buffers)
                self.counts.wall_s = time.perf_counter() - start
        finally:
            blocks = set(itertools.chain.from_iterable(r.hash_ids for r in requests))
            with uninterrupted():
                clean(self._client, [self._key(block) for block in blocks])
        return self.counts

    def _key(self, block: int) -> str:
        return f"{self._prefix}/{block}"

    def _wait_until(self, due: float) -> None:
        wait = due - time.perf_counter()
        if wait > 0:
            time.sleep(min(wait, threading.TIMEOUT_MAX))
        self.counts.late_s = max(self.counts.late_s, -wait)

    def _request(self, blocks: Sequence[int], buffers: Sequence[memoryview]) -> None:
        counts = self.counts
        counts.requests += 1
        counts.blocks += len(blocks)
        keys = [self._key(block) for block in blocks]
        found, looking = self._timed("query", self._client.ll_batch_query, keys)
        run = _leading(r.status == "ok" for r in found)
        hits, reading = self._read(blocks[:run], keys[:run], buffers[:run])
        counts.hits += hits
        writing = self._write(blocks[hits:], keys[hits:], buffers)
        counts.calls["request"].append(looking + reading + writing)

    def _read(
        self, blocks: Sequence[int], keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> tuple[int, float]:
        """Read the run and check what came; how many of it were still there, and the seconds of the call."""
        if not keys:
            return 0, 0.0
        items = [LLGetItemOpt(key=key) for key in keys]
        got, seconds = self._timed("get", self._client.ll_batch_get_into_items, items, buffers)
        self.counts.errors += sum(r.status < 0 for r in got)
        hits = _leading(r.status > 0 for r in got)
        for block, result, buffer in zip(blocks[:hits], got, buffers, strict=False):
            if not self._values.right(block, buffer[: result.status]):
                raise BenchError(f"the store gave a wrong value for {result.key}")
        return hits, seconds

    def _write(self, blocks: Sequence[int], keys: Sequence[str], buffers: Sequence[memoryview]) -> float:
        """Write values, made before the clock runs, as an engine has them; the seconds of the call."""
        if not keys:
            return 0.0
        for block, buffer in zip(blocks, buffers, strict=False):
            self._values.write(block, buffer[: self._size])
        items = [
            LLPutItem(key=key, value=buffer[: self._size]) for key, buffer in zip(keys, buffers, strict=False)
        ]
        put, seconds = self._timed("put", self._client.ll_batch_put, items)
        self.counts.written += sum(r.status == 0 for r in put)
        self.counts.errors += sum(r.status < 0 for r in put)
        return seconds

    def _timed(
        self, op: str, call: Callable[..., list[Result]], *arguments: object
    ) -> tuple[list[Result], float]:
        """A call's results and seconds; none if its deadline passed: an engine would go on without."""
        start = time.perf_counter()
        try:
            results = call(*arguments)
        except KvcsTimeoutError:
            self.counts.errors += 1
            results = []
        seconds = time.perf_counter() - start
        self.counts.calls[op].append(seconds)
        return results, seconds


def _leading(states: Iterable[bool]) -> int:
    return len(list(itertools.takewhile(bool, states)))


def summary(counts: Counts, requests: Sequence[Request], value_size: int, capacity: int) -> dict[str, Any]:
    """The figures of a replay beside those of the ideal caches of the same charged bytes, for JSON."""
    blocks = [r.hash_ids for r in requests]
    room = capacity // charged_bytes(value_size)
    ideal, best = ideal_lru(blocks, room), belady(blocks, room)
    looked_up = max(counts.blocks, 1)
    return {
        "requests": counts.requests,
        "blocks": counts.blocks,
        "capacity_blocks": room,
        "hit_rate": counts.hits / looked_up,
        "ideal_lru_hit_rate": ideal / looked_up,
        "belady_hit_rate": best / looked_up,
        "of_ideal_lru": counts.hits / ideal if ideal else None,
        "of_belady": counts.hits / best if best else None,
        "read_bytes": counts.hits * value_size,
        "written_bytes": counts.written * value_size,
        "errors": counts.errors,
        "wall_s": counts.wall_s,
        "late_s": counts.late_s,
        "latency": {
            op: {"calls": len(seconds), "busy_s": sum(seconds), **asdict(latency(seconds))}
            for op, seconds in counts.calls.items()
        },
    }


def as_text(figures: dict[str, Any]) -> str:
    """The summary for people."""
    share = figures["of_ideal_lru"]
    rates = [
        {"cache": "this store", "hit_rate": figures["hit_rate"]},
        {"cache": "ideal LRU", "hit_rate": figures["ideal_lru_hit_rate"]},
        {"cache": "best possible (Belady)", "hit_rate": figures["belady_hit_rate"]},
    ]
    calls = [{"call": op, **values} for op, values in figures["latency"].items()]
    of_ideal = "-" if share is None else format(share, ".4f")
    return f"""{figures["requests"]} requests, {figures["blocks"]} blocks
room for {figures["capacity_blocks"]} blocks
{as_table(rates)}
of the ideal LRU: {of_ideal}
read {format_size(figures["read_bytes"])}, written {format_size(figures["written_bytes"])}
errors {figures["errors"]}, {figures["wall_s"]:.1f} s, at most {figures["late_s"]:.2f} s late
{as_table(calls)}"""
