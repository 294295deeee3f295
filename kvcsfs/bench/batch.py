"""`kvcs-bench batch`: a matrix of ops, workers and batch sizes, one result a cell."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from kvcs import KvcsLowLevelClient
from kvcsfs.bench.dataset import Caller, Dataset, chunks, clean, fill, reach
from kvcsfs.bench.environment import Environment, Node, open_client
from kvcsfs.bench.interrupts import uninterrupted
from kvcsfs.bench.measure import Sample, latency, touched_buffers
from kvcsfs.config import format_size, parse_size
from kvcsfs.errors import ConfigError
from kvcsfs.progress import Progress

OPS = ("get", "put", "query", "delete", "mixed")
MIB = 1 << 20

# What the product asks of a benchmark: typical sizes, read/write ratios, peak concurrency and 1.5 x peak.
PRODUCTION_SIZES = (256 << 10, 1 * MIB, 4 * MIB, 16 * MIB)
PRODUCTION_READ_SHARES = (0.9, 0.5)
PRODUCTION_BATCH_BYTES = 128 * MIB
PRODUCTION_DATA_BYTES = 1 << 30


@dataclass(frozen=True)
class Cell:
    """One combination to measure; as many callers as client workers, unless the environment says."""

    op: str
    workers: int
    batch_size: int
    read_share: float


@dataclass(frozen=True)
class Result:
    """What one cell gave, all nodes and callers together. `read_share` is None but for op "mixed"."""

    op: str
    value_size: str
    read_share: float | None
    workers: int
    callers: int
    batch_size: int
    seconds: float
    batches: int
    keys_per_s: float
    mb_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    misses: int
    errors: int
    error: str  # the one that most of them were


@dataclass(frozen=True)
class Group:
    """Cells that work on one dataset."""

    dataset: Dataset
    cells: Sequence[Cell]


def matrix(
    environment: Environment, ops: Sequence[str], workers: Sequence[int], batch_sizes: Sequence[int]
) -> list[Group]:
    """The cells of the command line, on the environment's values."""
    cells = [
        Cell(op, count, size, environment.read_share)
        for op, size, count in itertools.product(ops, batch_sizes, workers)
    ]
    return [Group(_dataset(environment, environment.sizes, environment.keys), cells)]


def production(environment: Environment, peak: int) -> list[Group]:
    """The preset `production`: each typical size read, written and both, at `peak` callers and 1.5 x peak."""
    loads = [("get", 1.0), ("put", 0.0), *(("mixed", share) for share in PRODUCTION_READ_SHARES)]
    groups = []
    for size in PRODUCTION_SIZES:
        batch = min(128, PRODUCTION_BATCH_BYTES // size)
        cells = [
            Cell(op, count, batch, share) for op, share in loads for count in (peak, (peak * 3 + 1) // 2)
        ]
        keys = PRODUCTION_DATA_BYTES // size
        groups.append(Group(_dataset(environment, [(size, 1.0)], keys), cells))
    return groups


def _dataset(environment: Environment, sizes: Sequence[tuple[int, float]], keys: int) -> Dataset:
    """A dataset below a name of its own, so that two runs at once don't meet."""
    return Dataset(f"{environment.key_prefix}/{uuid.uuid4().hex[:12]}", tuple(sizes), keys)


class Matrix:
    """Runs groups of cells on every node, and leaves none of its keys behind.

    `connect` opens the client of a node: (settings, socket, workers, bytes of the largest value).
    """

    def __init__(
        self,
        environment: Environment,
        groups: Sequence[Group],
        connect: Callable[..., KvcsLowLevelClient] = open_client,
    ) -> None:
        self._environment, self._groups, self._connect = environment, groups, connect
        self._stop = threading.Event()
        for group in groups:
            self._check(group)

    def run(self) -> Generator[Result, None, None]:
        """One result a cell, as they come."""
        for node in self._environment.nodes:
            with self._open(node, 0, self._groups[0].dataset) as client:
                reach(client)
        with Progress(sum(len(g.cells) for g in self._groups)) as bar:
            for group in self._groups:
                yield from self._run_group(group, bar)

    def _check(self, group: Group) -> None:
        needed = max(self._callers(c) * c.batch_size for c in group.cells) * group.dataset.largest
        limit = parse_size(self._environment.buffer_memory)
        if needed > limit:
            raise ConfigError(
                f"the callers' buffers would take {format_size(needed)}, more than buffer_memory, "
                f"{format_size(limit)}; expected less of workers, batch or value size, or more memory"
            )
        if max(c.batch_size for c in group.cells) > group.dataset.count:
            raise ConfigError(f"batches are larger than the number of keys, {group.dataset.count}")

    def _callers(self, cell: Cell) -> int:
        return (self._environment.concurrency or cell.workers) * len(self._environment.nodes)

    def _open(self, node: Node, workers: int, dataset: Dataset) -> KvcsLowLevelClient:
        return self._connect(self._environment.client, node.socket, workers, dataset.largest)

    def _run_group(self, group: Group, bar: Progress) -> Iterator[Result]:
        buffers = max(self._callers(c) * c.batch_size for c in group.cells)
        with touched_buffers(buffers, group.dataset.largest) as memory:
            try:
                filled = False
                for cell in group.cells:
                    bar.step(f"{cell.op} {group.dataset.label} x {cell.batch_size}, {cell.workers} workers")
                    yield self._run_cell(cell, group.dataset, memory, filled)
                    filled = cell.op != "delete"
            finally:
                self._clean(group.dataset)

    def _run_cell(self, cell: Cell, dataset: Dataset, memory: Sequence[memoryview], filled: bool) -> Result:
        nodes = self._environment.nodes
        with ExitStack() as stack:
            clients = [stack.enter_context(self._open(node, cell.workers, dataset)) for node in nodes]
            count = self._callers(cell)
            parts = [memory[i * cell.batch_size : (i + 1) * cell.batch_size] for i in range(count)]
            callers = [Caller(clients[i % len(nodes)], dataset, part, i) for i, part in enumerate(parts)]
            if cell.op == "delete":
                samples, seconds = self._delete_rounds(callers, clients, dataset, cell)
            else:
                if not filled:
                    for client in clients:
                        fill(client, dataset, parts[0])
                samples, seconds = self._steady(callers, cell)
        return _result(cell, dataset, count, samples, seconds)

    def _steady(self, callers: Sequence[Caller], cell: Cell) -> tuple[list[Sample], float]:
        """Every caller at once, warm-up first; the calls begun after it, and how long they took together.

        Each caller makes one such call at least, however long a call takes.
        """
        begin = time.perf_counter() + self._environment.warm_up_s
        end = begin + self._environment.duration_s

        def work(caller: Caller) -> Iterator[Sample]:
            while True:
                sample = caller.call(cell.op, cell.read_share)
                yield sample
                if sample.start >= begin and time.perf_counter() >= end:
                    return

        samples = [s for s in self._together(callers, work) if s.start >= begin]
        return samples, max(s.start + s.seconds for s in samples) - begin

    def _delete_rounds(
        self, callers: Sequence[Caller], clients: Sequence[KvcsLowLevelClient], dataset: Dataset, cell: Cell
    ) -> tuple[list[Sample], float]:
        """Store everything (untimed), delete everything (timed), again and again until the duration is over.

        The first round is the warm-up, and one is timed whatever the duration.
        """
        samples: list[Sample] = []
        seconds, rounds = 0.0, 0
        end = time.perf_counter() + self._environment.duration_s
        while rounds < 2 or time.perf_counter() < end:
            for client in clients:
                fill(client, dataset, callers[0].buffers)
            left = {id(client): chunks(dataset.count, cell.batch_size) for client in clients}

            def work(caller: Caller, left: dict[int, list[Sequence[int]]] = left) -> Iterator[Sample]:
                mine = left[id(caller.client)]
                while True:
                    try:
                        indexes = mine.pop()
                    except IndexError:
                        return
                    yield caller.delete(indexes)

            start = time.perf_counter()
            done = self._together(callers, work)
            if rounds:
                samples += done
                seconds += time.perf_counter() - start
            rounds += 1
        return samples, seconds

    def _together(
        self, callers: Sequence[Caller], work: Callable[[Caller], Iterator[Sample]]
    ) -> list[Sample]:
        """What every caller yields, each in a thread of its own; a failure or an interrupt stops them all."""

        def loop(caller: Caller) -> list[Sample]:
            samples = []
            for sample in work(caller):
                samples.append(sample)
                if self._stop.is_set():
                    break
                if sample.errors == sample.keys:  # a daemon that is gone answers at once: don't spin on it
                    self._stop.wait(0.05)
            return samples

        with ThreadPoolExecutor(len(callers)) as pool:
            try:
                futures = [pool.submit(loop, caller) for caller in callers]
                return [sample for future in futures for sample in future.result()]
            except BaseException:
                self._stop.set()
                raise

    def _clean(self, dataset: Dataset) -> None:
        with uninterrupted():
            for node in self._environment.nodes:
                with self._open(node, 0, dataset) as client:
                    clean(client, dataset.keys)


def _result(cell: Cell, dataset: Dataset, callers: int, samples: Sequence[Sample], seconds: float) -> Result:
    failures: Counter[str] = sum((s.failures for s in samples), Counter())
    good = sum(s.keys for s in samples) - failures.total()
    return Result(
        op=cell.op,
        value_size=dataset.label,
        read_share=cell.read_share if cell.op == "mixed" else None,
        workers=cell.workers,
        callers=callers,
        batch_size=cell.batch_size,
        seconds=seconds,
        batches=len(samples),
        keys_per_s=good / seconds,
        mb_per_s=sum(s.bytes for s in samples) / seconds / 1e6,
        **asdict(latency(s.seconds for s in samples)),
        misses=sum(s.misses for s in samples),
        errors=failures.total(),
        error=failures.most_common(1)[0][0] if failures else "",
    )
