"""What a client counts. prometheus_client is imported when its text is asked for, never before."""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter, strftime
from typing import TYPE_CHECKING, Any, TypeAlias

from kvcsfs.errors import KvcsError
from kvcsfs.sdk.deadline import wait_seconds
from kvcsfs.sdk.transfer import PENDING

if TYPE_CHECKING:
    from prometheus_client.core import HistogramMetricFamily, Metric

OPS = ("put", "get", "delete", "exists")
PHASES = ("queue", "request", "transfer", "commit")
log = logging.getLogger("kvcs")

# Upper bounds in seconds, 8 to a doubling: 1 us to 2 hours, a percentile is right to 9 %. Prometheus gets every 8th.
_STEPS = 8
BOUNDS = [1e-6 * 2 ** (i / _STEPS) for i in range(33 * _STEPS + 1)]

Summary: TypeAlias = dict[str, float]


class Recorder:
    """Latencies in fixed buckets."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.count, self.sum, self.max = 0, 0.0, 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.count += 1
        self.sum += seconds
        self.max = max(self.max, seconds)

    def percentile(self, share: float) -> float:
        """The bound below which this share of the latencies lies; 0 if there are none."""
        want, seen = math.ceil(self.count * share), 0
        for bound, count in zip([*BOUNDS, math.inf], self.counts, strict=True):
            seen += count
            if seen >= want > 0:
                return min(bound, self.max)
        return 0.0

    def summary(self) -> Summary:
        names = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
        return {"count": self.count, "sum": self.sum, "max": self.max} | {
            name: self.percentile(share) for name, share in names.items()
        }

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts, as Prometheus has them."""
        out: list[tuple[str, float]] = []
        seen = 0
        for i, count in enumerate(self.counts[:-1]):
            seen += count
            if i % _STEPS == 0:
                out.append((f"{BOUNDS[i]:.9g}", seen))
        return [*out, ("+Inf", self.count)]


class OpCounts:
    def __init__(self) -> None:
        self.results: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.keys = self.bytes = self.batches = self.inflight_batches = self.inflight_keys = 0
        self.latency = Recorder()
        self.phases = {phase: Recorder() for phase in PHASES}

    def count_keys(self, op: str, statuses: Sequence[int], failure: KvcsError | None) -> None:
        """Sort statuses into hits, misses and errors; with a failure the keys without an answer have its errno."""
        miss = -errno.ENOENT if op == "delete" else 0 if op != "put" else 1
        for status in statuses:
            if status == miss:
                self.results["miss"] += 1
            elif status >= 0:
                self.results["success"] += 1
            else:
                number = failure.errno if failure is not None and status == PENDING else -status
                self.results["error"] += 1
                self.errors[errno.errorcode.get(number, str(number))] += 1

    def as_dict(self) -> dict[str, Any]:
        return {
            **{result: self.results[result] for result in ("success", "miss", "error")},
            "errors": dict(self.errors),
            "keys": self.keys,
            "bytes": self.bytes,
            "batches": self.batches,
            "inflight_batches": self.inflight_batches,
            "inflight_keys": self.inflight_keys,
            "latency": self.latency.summary(),
            "phases": {
                phase: recorder.summary() for phase, recorder in self.phases.items() if recorder.count
            },
        }


class Meter:
    """Counts by op. One lock: a call takes it twice, and once for each phase of a part."""

    def __init__(self) -> None:
        self.ops = {op: OpCounts() for op in OPS}
        self._lock = threading.Lock()

    @contextmanager
    def batch(self, op: str, statuses: Sequence[int], sizes: Sequence[int]) -> Iterator[None]:
        """Count one call, whose statuses are final when it ends. `sizes`: bytes of a key that succeeded."""
        counts, begin, failure = self.ops[op], perf_counter(), None
        with self._lock:
            counts.inflight_batches += 1
            counts.inflight_keys += len(statuses)
        try:
            yield
        except KvcsError as exc:
            failure = exc
            raise
        finally:
            with self._lock:
                counts.inflight_batches -= 1
                counts.inflight_keys -= len(statuses)
                counts.batches += 1
                counts.keys += len(statuses)
                counts.latency.add(perf_counter() - begin)
                counts.count_keys(op, statuses, failure)
                counts.bytes += sum(
                    size for size, status in zip(sizes, statuses, strict=False) if status >= 0 < size
                )

    def phase(self, op: str, phase: str, seconds: float) -> None:
        with self._lock:
            self.ops[op].phases[phase].add(seconds)

    def phases(self, op: str, begin: float, asked: float, answered: float) -> None:
        """Note one part of a batch: when it began, asked the daemon, had its first answer; its transfer ends now."""
        now = perf_counter()
        with self._lock:
            phases = self.ops[op].phases
            phases["queue"].add(asked - begin)
            phases["request"].add(answered - asked)
            phases["transfer"].add(now - answered)

    def as_dict(self) -> dict[str, Any]:
        with self._lock:
            return {op: counts.as_dict() for op, counts in self.ops.items()}

    def text(self) -> str:
        """The metrics in the text format of Prometheus, from a registry of their own."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry).decode()

    def collect(self) -> Iterator[Metric]:
        """What a registry asks its collectors."""
        with self._lock:
            families = _families(self.ops)
        yield from families


def _families(ops: dict[str, OpCounts]) -> list[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    def counter(name: str, text: str, labels: Sequence[str]) -> CounterMetricFamily:
        return CounterMetricFamily(f"kvcs_client_{name}", text, labels=labels)

    results = counter("ops", "Keys by op and result.", ("op", "result"))
    errors = counter("errors", "Keys that failed, by errno.", ("op", "errno"))
    keys = counter("keys", "Keys asked for.", ("op",))
    size = counter("bytes", "Bytes of values moved.", ("op",))
    batches = counter("batches", "Calls.", ("op",))
    in_batches = GaugeMetricFamily("kvcs_client_inflight_batches", "Calls under way.", labels=("op",))
    in_keys = GaugeMetricFamily("kvcs_client_inflight_keys", "Keys of calls under way.", labels=("op",))
    latency = HistogramMetricFamily("kvcs_client_batch_latency_seconds", "Time of a call.", labels=("op",))
    phase = HistogramMetricFamily(
        "kvcs_client_phase_seconds", "Time of a call by phase.", labels=("op", "phase")
    )
    for op, counts in ops.items():
        for result in ("success", "miss", "error"):
            results.add_metric((op, result), counts.results[result])
        for name, count in counts.errors.items():
            errors.add_metric((op, name), count)
        for family, value in (
            (keys, counts.keys),
            (size, counts.bytes),
            (batches, counts.batches),
            (in_batches, counts.inflight_batches),
            (in_keys, counts.inflight_keys),
        ):
            family.add_metric((op,), value)
        _add(latency, (op,), counts.latency)
        for name, recorder in counts.phases.items():
            if recorder.count:
                _add(phase, (op, name), recorder)
    return [results, errors, keys, size, batches, in_batches, in_keys, latency, phase]


def _add(family: HistogramMetricFamily, labels: Sequence[str], recorder: Recorder) -> None:
    family.add_metric(labels, recorder.buckets(), recorder.sum)


class Reporter:
    """A thread that writes a line of throughput and latency by op every so many seconds in which something happened."""

    def __init__(self, meter: Meter, seconds: float, path: str | os.PathLike[str] | None) -> None:
        self._meter, self._seconds, self._path = meter, seconds, path
        self._stop = threading.Event()
        self._before = dict.fromkeys(OPS, (0, 0, 0))
        self._thread = threading.Thread(target=self._run, name="kvcs-report", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        write: Callable[[str], None] = log.info if self._path is None else self._append
        while not self._stop.wait(wait_seconds(self._seconds)):
            for line in self.lines():
                write(line)

    def _append(self, line: str) -> None:
        try:
            with open(self._path or "", "a", encoding="utf-8") as file:
                file.write(f"{strftime('%Y-%m-%dT%H:%M:%S%z')} {line}\n")
        except OSError as exc:
            log.error("can't write the performance report to %s: %s", self._path, exc.strerror)  # noqa: TRY400
            self._stop.set()

    def lines(self) -> list[str]:
        """One line for each op that did something since the last time; latencies are over the client's life."""
        out = []
        for op, counts in self._meter.as_dict().items():
            now = counts["batches"], counts["keys"], counts["bytes"]
            batches, keys, size = (a - b for a, b in zip(now, self._before[op], strict=True))
            self._before[op] = now
            if batches:
                latency = counts["latency"]
                out.append(
                    f"{op}: {batches} batches, {keys / self._seconds:.0f} keys/s, "
                    f"{size / self._seconds / 1e6:.1f} MB/s, "
                    f"p50 {latency['p50'] * 1e3:.2f} ms, p99 {latency['p99'] * 1e3:.2f} ms, "
                    f"max {latency['max'] * 1e3:.2f} ms"
                )
        return out
