"""Percentiles, and the forms that results are printed in."""

import csv
import io
import json

import pytest

from kvcsfs.bench.measure import latency, percentile, touched_buffers
from kvcsfs.bench.output import as_csv, as_json, as_table
from kvcsfs.progress import Progress

ROWS = [
    {"op": "get", "keys": 1234, "ms": 0.5, "share": None},
    {"op": "put, all", "keys": 5, "ms": 12345.6, "share": 0.25},
]


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, 5), (0.9, 9), (0.99, 10), (1.0, 10), (0.1, 1), (0.11, 2), (0.0, 1)]
)
def test_percentile_is_the_nearest_rank(share, expected):
    assert percentile(list(range(1, 11)), share) == expected


def test_percentiles_of_nothing_and_of_one():
    assert percentile([], 0.5) == 0.0
    assert latency([0.002]) == latency([0.002, 0.002])
    assert latency([0.004, 0.001, 0.003, 0.002]).p50_ms == pytest.approx(2)
    assert latency([0.004, 0.001, 0.003, 0.002]).max_ms == pytest.approx(4)


def test_buffers_have_their_size_and_are_filled():
    with touched_buffers(3, 5000) as buffers:
        assert [len(b) for b in buffers] == [5000] * 3
        assert all(any(b[4096:]) for b in buffers)


def test_json():
    assert json.loads(as_json(ROWS)) == ROWS


def test_csv():
    read = list(csv.DictReader(io.StringIO(as_csv(ROWS))))
    assert read == [
        {"op": "get", "keys": "1234", "ms": "0.5", "share": ""},
        {"op": "put, all", "keys": "5", "ms": "12345.6", "share": "0.25"},
    ]


def test_table():
    assert as_table(ROWS).splitlines() == [
        "op        keys      ms  share",
        "get       1234     0.5      -",
        "put, all     5  12,346   0.25",
    ]
    assert as_table([]) == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_shows_on_a_terminal_alone():
    terminal, pipe = Terminal(), io.StringIO()
    for out in (terminal, pipe):
        with Progress(2, out) as bar:
            bar.step("first")
            bar.step("second")
    assert pipe.getvalue() == ""
    assert "] 0/2 first" in terminal.getvalue()
    assert "[############            ] 1/2 second" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
