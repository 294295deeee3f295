"""Rows of results as a table for people, as JSON, or as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

Row = Mapping[str, Any]


def as_json(document: Any) -> str:
    """JSON for programs, indented for people."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def as_csv(rows: Sequence[Row]) -> str:
    """One line a row below a line of names, which are those of the first row."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")


def as_table(rows: Sequence[Row]) -> str:
    """Aligned columns: numbers to the right, texts to the left."""
    if not rows:
        return ""
    columns = [[name, *(_text(row[name]) for row in rows)] for name in rows[0]]
    right = [not isinstance(rows[0][name], str) for name in rows[0]]
    widths = [max(map(len, column)) for column in columns]
    lines = (
        "  ".join(f"{cell:{'>' if r else '<'}{w}}" for cell, r, w in zip(line, right, widths, strict=True))
        for line in zip(*columns, strict=True)
    )
    return "\n".join(line.rstrip() for line in lines)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
    return str(value)
