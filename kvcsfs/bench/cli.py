"""The command line of kvcs-bench. See docs/benchmarking.md."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from kvcsfs.bench import batch, compare, trace
from kvcsfs.bench.daemon import own_daemon
from kvcsfs.bench.environment import Environment, load_environment, open_client
from kvcsfs.bench.interrupts import interrupt_on_sigterm
from kvcsfs.bench.output import as_csv, as_json, as_table
from kvcsfs.bench.peers.job import Work
from kvcsfs.bench.plot import check_plot, save_plot
from kvcsfs.config import parse_size
from kvcsfs.errors import ConfigError, KvcsError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run kvcs-bench; exit status 0, 1 when the benchmark failed, 2 for a wrong request, 130 interrupted."""
    options = _parser().parse_args(arguments)
    interrupt_on_sigterm()
    try:
        options.run(options, load_environment(options.environment))
    except ConfigError as exc:
        print(f"kvcs-bench: {exc}", file=sys.stderr)
        return 2
    except (KvcsError, OSError) as exc:
        print(f"kvcs-bench: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kvcs-bench: interrupted", file=sys.stderr)
        return 130
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as every other failure is told."""
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kvcs-bench", description="How fast a store is, and how well it caches.")
    parser.add_argument("--environment", type=Path, metavar="FILE", help="JSON: nodes, client, values, times")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _batch_options(commands.add_parser("batch", help="a matrix of ops, workers and batch sizes"))
    _trace_options(
        commands.add_parser("trace", help="replay a recorded load; hit rate beside the ideal caches'")
    )
    _compare_options(
        commands.add_parser("compare", help="the same work here, on other stores, and at the limit")
    )
    return parser


def _batch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", type=_names(batch.OPS), default=["get"], help=f"of {','.join(batch.OPS)}")
    parser.add_argument("--workers", type=_counts, default=[2, 4, 8, 16], help="client workers, and callers")
    parser.add_argument("--batch-sizes", type=_counts, default=[128], help="keys a call")
    parser.add_argument(
        "--preset", choices=["production"], help="typical sizes, ratios and loads, instead of a matrix"
    )
    parser.add_argument("--peak", type=_count, default=8, help="peak concurrency of the preset (%(default)s)")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="write a .png or .svg: throughput and p99 over workers"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true")
    form.add_argument("--csv", action="store_true")
    parser.set_defaults(run=_batch)


def _batch(options: argparse.Namespace, environment: Environment) -> None:
    if options.plot:
        check_plot(options.plot)
    if options.preset:
        groups = batch.production(environment, options.peak)
    else:
        groups = batch.matrix(environment, options.ops, options.workers, options.batch_sizes)
    results = list(batch.Matrix(environment, groups).run())
    rows = [dataclasses.asdict(result) for result in results]
    print(as_json(rows) if options.json else as_csv(rows) if options.csv else as_table(rows))
    if options.plot:
        save_plot(results, options.plot)


def _trace_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="JSON lines, gzipped or not: timestamp, hash_ids"
    )
    parser.add_argument("--capacity", type=_size, required=True, help="of the store, such as 4GiB")
    parser.add_argument(
        "--value-size", type=_size, default=64 << 10, help="bytes a block of the trace stands for (64KiB)"
    )
    parser.add_argument(
        "--speed", type=_speed, default=0.0, help='"max" (default), or times the trace\'s own timing'
    )
    parser.add_argument("--max-requests", type=_count, default=0, help="replay only the first of them")
    parser.add_argument("--socket", help="of a running daemon that holds nothing else; else one is started")
    parser.add_argument(
        "--data", type=_directory, help="directory below which a daemon of our own keeps its data"
    )
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_trace)


def _trace(options: argparse.Namespace, environment: Environment) -> None:
    requests = trace.read_trace(options.file, options.max_requests)
    with ExitStack() as stack:
        socket = options.socket or environment.nodes[0].socket
        if socket is None:
            directory = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="kvcs-bench-", dir=options.data)
            )
            socket = stack.enter_context(own_daemon(Path(directory) / "store", options.capacity))
        client = stack.enter_context(open_client(environment.client, socket, 0, options.value_size))
        counts = trace.Replay(client, environment.key_prefix, options.value_size).run(requests, options.speed)
    figures = trace.summary(counts, requests, options.value_size, options.capacity)
    print(as_json(figures) if options.json else trace.as_text(figures))


def _compare_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--works",
        type=_works,
        default=compare.DEFAULT_WORKS,
        metavar="OP:SIZExCOUNT,...",
        help="get, put or query (half of the keys hits), bytes a value, keys a batch (%(default)s)",
    )
    parser.add_argument(
        "--peers",
        type=_names(tuple(compare.PEERS)),
        default=list(compare.PEERS),
        help=f"of {','.join(compare.PEERS)}",
    )
    parser.add_argument(
        "--turns", type=_count, default=7, help="timed turns of each, one after the other (%(default)s)"
    )
    parser.add_argument(
        "--workers", type=_count, default=4, help="threads, for all who use any (%(default)s)"
    )
    parser.add_argument(
        "--data", type=_directory, help="directory for all files, on the file system to measure"
    )
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_compare)


def _compare(options: argparse.Namespace, _environment: Environment) -> None:
    with tempfile.TemporaryDirectory(prefix="kvcs-bench-", dir=options.data) as directory:
        figures = compare.compare(
            Path(directory), options.works, options.peers, options.turns, options.workers
        )
    print(as_json(figures) if options.json else compare.as_text(figures))


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"{name!r}: expected names of {', '.join(known)}, with commas between"
                )
        if len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(f"{text!r}: expected each name once")
        return names

    return parse


def _directory(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a directory that exists")
    return Path(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 1")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _size(text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None
    if size < 1:
        raise argparse.ArgumentTypeError("expected more than 0 bytes")
    return size


def _speed(text: str) -> float:
    """0 for as fast as possible."""
    try:
        speed = 0.0 if text == "max" else float(text)
    except ValueError:
        speed = -1.0
    if text != "max" and not 0 < speed < float("inf"):
        raise argparse.ArgumentTypeError(f'{text!r}: expected "max" or a number above 0')
    return speed


def _works(text: str) -> list[Work]:
    try:
        return [compare.parse_work(part) for part in text.split(",")]
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


if __name__ == "__main__":
    sys.exit(main())
