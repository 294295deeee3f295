"""Timing a connector beside its engine's own file backend: the same work, the same directory, turn by turn."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGES = 128  # what SGLang moves in one call
TURNS = 7
WARM_TURNS = 4  # until both are full
BATCHES_KEPT = 3  # what a store has room for: a store of a new batch replaces the oldest

Step = Callable[[int], None]  # the number of the turn, which makes its keys


def capacity(page_bytes: int, pages: int = PAGES) -> int:
    """Room for BATCHES_KEPT batches, footers included."""
    return BATCHES_KEPT * pages * (page_bytes + 8192)


def compare(
    title: str, page_bytes: int, contestants: dict[str, tuple[Step, Step]], pages: int = PAGES
) -> dict[str, Any]:
    """Time store and load of so many pages for each, alternating who is first; milliseconds, median and range."""
    times: dict[str, dict[str, list[float]]] = {name: {"store": [], "load": []} for name in contestants}
    for turn in range(WARM_TURNS + TURNS):
        names = list(contestants)[:: 1 if turn % 2 else -1]
        for name in names:
            for what, step in zip(("store", "load"), contestants[name], strict=True):
                start = time.perf_counter()
                step(turn)
                if turn >= WARM_TURNS:
                    times[name][what].append((time.perf_counter() - start) * 1e3)
    figures = {
        name: {what: [round(f(t), 1) for f in (statistics.median, min, max)] for what, t in whats.items()}
        for name, whats in times.items()
    }
    row = {"title": title, "page_bytes": page_bytes, "pages": pages, "turns": TURNS, "ms": figures}
    report = os.environ.get("KVCSFS_BENCH_REPORT")
    if report:
        with Path(report).open("a") as file:
            file.write(json.dumps(row) + "\n")
    print("\n" + json.dumps(row))
    return row
