"""Throughput and p99 over workers as a picture; needs matplotlib."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kvcsfs.bench.batch import Result
from kvcsfs.errors import ConfigError


def check_plot(file: Path) -> None:
    """Refuse a plot that could not be written, before the run rather than after it.

    Raises:
        ConfigError: another ending than .png or .svg, no such directory, or no matplotlib.
    """
    if file.suffix not in {".png", ".svg"}:
        raise ConfigError(f"--plot {file}: expected a name that ends in .png or .svg")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--plot {file}: {file.absolute().parent} is not a directory")
    _matplotlib()


def save_plot(results: Sequence[Result], file: Path) -> None:
    """Two rows of pictures, throughput above p99, one column an op and value size, one line a batch size."""
    figures = _matplotlib()
    groups = sorted({(r.op, r.value_size, r.read_share) for r in results}, key=str)
    figure, axes = figures.subplots(2, len(groups), squeeze=False, figsize=(4.5 * len(groups), 7))
    for column, group in enumerate(groups):
        members = [r for r in results if (r.op, r.value_size, r.read_share) == group]
        op, size, share = group
        title = f"{op} {size}" if share is None else f"{op} {size}, {share:.0%} reads"
        label, field = ("keys/s", "keys_per_s") if op in {"query", "delete"} else ("MB/s", "mb_per_s")
        _draw(axes[0][column], members, label, operator.attrgetter(field))
        _draw(axes[1][column], members, "p99 ms", operator.attrgetter("p99_ms"))
        axes[0][column].set_title(title)
    figure.tight_layout()
    figure.savefig(file)
    figures.close(figure)


def _draw(axis: Any, results: Sequence[Result], label: str, value: Callable[[Result], float]) -> None:
    for size in sorted({r.batch_size for r in results}):
        line = sorted((r.workers, value(r)) for r in results if r.batch_size == size)
        axis.plot(*zip(*line, strict=True), marker="o", label=f"batches of {size}")
    axis.set_xlabel("workers")
    axis.set_ylabel(label)
    axis.set_ylim(bottom=0)
    axis.grid(visible=True, alpha=0.3)
    axis.legend()


def _matplotlib() -> ModuleType:
    try:
        importlib.import_module("matplotlib").use("Agg")  # no display needed
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as exc:
        raise ConfigError(f"--plot needs matplotlib: {exc}; pip install 'kvcsfs[bench]'") from None
