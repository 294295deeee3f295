"""What a contestant of a comparison is given, and what it gives."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from kvcsfs.bench.errors import BenchError

# A full cache holds so many batches. Above four, as the SDK splits what is over a quarter of the capacity.
FULL_BATCHES = 5
# A query takes so little time that one turn makes this many.
QUERY_ROUNDS = 20


class MissingPeerError(BenchError):
    """A peer that is not installed, or does not do this work. The comparison goes on without it."""


@dataclass(frozen=True)
class Work:
    """One work: `op` (get, put or query) on batches of `count` keys whose values have `size` bytes."""

    op: str
    size: int
    count: int

    @property
    def batch_bytes(self) -> int:
        """Bytes of the values of one batch."""
        return self.size * self.count


@dataclass(frozen=True)
class Job:
    """A work, with what is the same for all who do it.

    `directory` is the contestant's own, on the file system that is measured. `buffers` are shared, in turns.
    """

    work: Work
    directory: Path
    workers: int
    buffers: list[memoryview]
    threads: ThreadPoolExecutor

    def key(self, turn: int, index: int) -> str:
        """A key as long as an engine's: model, version, hash of a prefix."""
        return f"model-a/v1/{turn:024d}{index:040d}"

    def keys(self, turn: int) -> list[str]:
        """The keys of a turn, fresh for each; none before the first."""
        return [self.key(turn, i) for i in range(self.work.count)] if turn >= 0 else []

    def half(self) -> list[str]:
        """The keys of a query: every other one is stored, as a key of turn 0."""
        return [self.key(i % 2, i) for i in range(self.work.count)]

    def in_threads(self, step: Callable[[int], None]) -> None:
        """`step(i)` for every key of a batch, each thread with its share."""

        def share(first: int) -> None:
            for i in range(first, self.work.count, self.workers):
                step(i)

        list(self.threads.map(share, range(self.workers)))

    def queried(self, ask: Callable[[], int]) -> None:
        """`ask`, which answers the number of hits, as often as one turn does.

        Raises:
            BenchError: not the half of the keys that is there was found.
        """
        for _ in range(QUERY_ROUNDS):
            hits = ask()
            if hits != (self.work.count + 1) // 2:
                raise BenchError(f"a query found {hits} of {self.work.count} keys, expected half of them")


def nothing(_turn: int) -> None:
    """No preparation."""


class Turn(NamedTuple):
    """One contestant at a work: `run(turn)` is timed; `prepare(turn)` before it makes room, and is not."""

    run: Callable[[int], None]
    prepare: Callable[[int], None] = nothing


# Opens a contestant for one work; gives its turns by name, several where it can be set up in several ways.
Peer = Callable[[Job], AbstractContextManager[dict[str, Turn]]]
Turns = Iterator[dict[str, Turn]]


def optional(module: str, package: str) -> ModuleType:
    """Import a peer's client.

    Raises:
        MissingPeerError: it is not installed, or lacks something itself.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name and module.startswith(exc.name):
            raise MissingPeerError(f"not installed: pip install {package}") from None
        raise MissingPeerError(f"{package} can't be loaded: {exc}") from None
    except ImportError as exc:
        raise MissingPeerError(f"{package} can't be loaded: {exc}") from None
