"""The trace replay: what is read from a file, asked of a store, and said about it."""

import gzip
import threading
from pathlib import Path

import pytest

from kvcs import KvcsTimeoutError
from kvcsfs.bench.errors import BenchError
from kvcsfs.bench.policies import charged_bytes, ideal_lru
from kvcsfs.bench.trace import Replay, Request, Values, as_text, read_trace, summary
from kvcsfs.errors import ConfigError
from tests.unit.bench_fake import FakeStore, fake_client

TINY = Path(__file__).parents[1] / "data" / "tiny_trace.jsonl"
SIZE = 100


def test_a_trace_is_read_plain_or_gzipped(tmp_path):
    requests = read_trace(TINY)
    assert [r.hash_ids for r in requests][:2] == [[0, 1, 2], [0, 3]]
    assert [r.timestamp for r in requests] == [0, 100, 250, 300, 400, 500]
    packed = tmp_path / "t.gz"
    packed.write_bytes(gzip.compress(TINY.read_bytes()))
    assert read_trace(packed) == requests
    assert read_trace(packed, limit=2) == requests[:2]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            b'{"timestamp": 0, "hash_ids": [1]}\n{"timestamp": 1}\n',
            "t:2: Object missing required field hash_ids",
        ),
        (b'{"timestamp": 0, "hash_ids": ["a"]}\n', "t:1: Expected int, got str"),
        (b"nonsense\n", "t:1: JSON is malformed"),
        (b"\n\n", "t: holds no request"),
        (b"\x1f\x8bnonsense", "t: can't be read"),
        (gzip.compress(b"x" * 99, mtime=0)[:-12], "t: can't be read"),
    ],
)
def test_a_wrong_trace_is_one_line_that_says_where(tmp_path, content, says):
    file = tmp_path / "t"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_trace(file)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_tell_blocks_apart():
    values = Values(SIZE)
    out = memoryview(bytearray(SIZE))
    for block in (0, 1, 64, 1 << 40):
        values.write(block, out)
        assert values.right(block, out)
        assert not values.right(block + 1, out)
        assert not values.right(block + 64, out)  # the same body, other stamps
        assert not values.right(block, out[:-1])
    out[50] ^= 1
    assert not values.right(1 << 40, out)


def test_a_value_too_small_to_be_told_apart_is_refused():
    with pytest.raises(ConfigError, match="expected at least 17 bytes"):
        Values(16)


@pytest.mark.parametrize("room", [1, 2, 3, 4, 5, 9])
def test_a_replay_on_an_lru_hits_as_the_ideal_one(room):
    requests = read_trace(TINY)
    store = FakeStore(room)
    counts = Replay(fake_client(store), "p", SIZE).run(requests, 0)
    assert counts.hits == ideal_lru([r.hash_ids for r in requests], room)
    assert (counts.requests, counts.blocks, counts.errors) == (6, 18, 0)
    assert counts.written == counts.blocks - counts.hits
    assert not store.values


def test_the_summary_sets_the_store_beside_the_ideal_caches():
    requests = read_trace(TINY)
    counts = Replay(fake_client(FakeStore(3)), "p", SIZE).run(requests, 0)
    figures = summary(counts, requests, SIZE, 3 * charged_bytes(SIZE) + 1)
    assert figures["capacity_blocks"] == 3
    assert figures["hit_rate"] == figures["ideal_lru_hit_rate"] <= figures["belady_hit_rate"]
    assert figures["of_ideal_lru"] == 1.0
    assert figures["read_bytes"] + figures["written_bytes"] == 18 * SIZE
    assert figures["latency"]["request"]["calls"] == figures["latency"]["query"]["calls"] == 6
    assert "ideal LRU" in as_text(figures)


def test_the_traces_own_timing_is_kept():
    requests = read_trace(TINY)
    counts = Replay(fake_client(FakeStore()), "p", SIZE).run(requests, speed=50)
    assert counts.wall_s >= 0.5 / 50


def test_a_wrong_value_ends_the_replay_and_the_keys_are_gone():
    store = FakeStore()

    def corrupt(op):
        if op == "get":
            store.values.update({key: value[:-1] + b"!" for key, value in store.values.items()})

    store.on_call = corrupt
    with pytest.raises(BenchError, match="gave a wrong value for p/"):
        Replay(fake_client(store), "p", SIZE).run(read_trace(TINY), 0)
    assert not store.values


def test_a_query_past_its_deadline_costs_its_hits_alone():
    store = FakeStore()
    asked = []

    def late(op):
        asked.append(op)
        if asked.count("query") == 1 + 3 and op == "query":
            raise KvcsTimeoutError("the deadline passed")

    store.on_call = late
    counts = Replay(fake_client(store), "p", SIZE).run(read_trace(TINY), 0)
    assert counts.errors == 1
    assert counts.hits == 10 - 3  # without the third request's run


@pytest.mark.parametrize("ids", [[[]], [[1 << 63, 1 << 200], [], [1 << 63, -1]]])
def test_blocks_may_have_any_numbers_and_a_request_none(ids):
    requests = [Request(0, blocks) for blocks in ids]
    counts = Replay(fake_client(FakeStore()), "p", SIZE).run(requests, 0)
    assert (counts.blocks, counts.hits, counts.errors) == (sum(map(len, ids)), len(ids) // 2, 0)


def test_a_request_in_a_thousand_years_is_waited_for(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    Replay(fake_client(FakeStore()), "p", SIZE).run([Request(0, [1]), Request(1e300, [1])], 1)
    assert slept == [threading.TIMEOUT_MAX]
