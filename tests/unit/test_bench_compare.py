"""The comparison, on works of a few kilobytes: who takes part, what is checked, what is printed."""

import contextlib
import json

import pytest

from kvcsfs.bench import compare
from kvcsfs.bench.errors import BenchError
from kvcsfs.bench.peers.job import MissingPeerError, Turn, Work, optional

GET, PUT, QUERY = (Work(op, 4096, 5) for op in ("get", "put", "query"))
LOCAL = ["limit", "files"]


def names(figures):
    return [[row["name"] for row in work["contestants"]] for work in figures["works"]]


def test_works_are_read_and_refused():
    assert compare.parse_work("get:4MiBx128") == Work("get", 4 << 20, 128)
    assert compare.parse_work("query:100x3") == Work("query", 100, 3)
    for wrong in ("get:4MiB", "scan:1KiBx2", "get:bigx2", "get:1KiBx0", "get:1x5"):
        with pytest.raises(ValueError, match="expected"):
            compare.parse_work(wrong)


def test_the_limit_and_plain_files(tmp_path):
    figures = compare.compare(tmp_path, [GET, PUT, QUERY], LOCAL, turns=3, workers=2)
    assert names(figures) == [["limit", "files"], ["limit", "files", "files-unbounded"], ["files"]]
    for row in figures["works"][0]["contestants"]:
        assert len(row["turns_ms"]) == 3
        assert row["of_limit"] > 0
        assert row["of_kvcsfs"] is None
    assert figures["works"][0]["contestants"][0]["of_limit"] == 1.0
    assert json.loads(json.dumps(figures)) == figures
    assert figures["machine"]["cores"] >= 1
    assert "query 4.0 KiB x 5\nname" in compare.as_text(figures)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("peer", ["redis", "lmdb"])
def test_a_peer_that_is_installed_does_every_work(tmp_path, peer):
    pytest.importorskip(peer)
    try:
        figures = compare.compare(tmp_path, [GET, PUT, QUERY], [peer], turns=1, workers=2)
    except MissingPeerError as exc:
        pytest.skip(str(exc))
    if figures["works"][0]["contestants"] == []:
        pytest.skip("its server is not installed")
    assert names(figures) == [[peer]] * 3


def test_a_missing_peer_is_told_in_one_line_and_left_out(tmp_path, capsys, monkeypatch):
    @contextlib.contextmanager
    def absent(job):
        optional("kvcs_no_such_module", "nothing")
        yield {}

    monkeypatch.setitem(compare.PEERS, "redis", absent)
    figures = compare.compare(tmp_path, [GET], ["limit", "redis"], turns=1, workers=1)
    assert names(figures) == [["limit"]]
    assert capsys.readouterr().err == "kvcs-bench: get: without redis: not installed: pip install nothing\n"


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        ("raise ImportError('libgone.so.1: cannot open')", "libgone.so.1: cannot open"),
        ("import kvcs_no_such_module", "No module named 'kvcs_no_such_module'"),
    ],
)
def test_a_peer_that_lacks_something_itself_says_what(tmp_path, monkeypatch, cause, told):
    (tmp_path / "kvcs_lame.py").write_text(cause)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingPeerError, match=f"^lame can't be loaded: {told}$"):
        optional("kvcs_lame", "lame")


def test_they_take_turns_and_puts_have_fresh_keys(tmp_path, monkeypatch):
    seen = []

    def recorder(name):
        @contextlib.contextmanager
        def peer(job):
            yield {
                name: Turn(
                    lambda turn: seen.append((name, turn)), lambda turn: seen.append(("prepare", turn))
                )
            }

        return peer

    monkeypatch.setattr(compare, "PEERS", {"a": recorder("a"), "b": recorder("b")})
    compare.compare(tmp_path, [PUT], ["a", "b"], turns=2, workers=1)
    turn_7, turn_8 = seen[-8:-4], seen[-4:]
    assert turn_7 == [("prepare", 7), ("a", 7), ("prepare", 7), ("b", 7)]
    assert turn_8 == [("prepare", 8), ("a", 8), ("prepare", 8), ("b", 8)]
    assert [turn for name, turn in seen if name == "a"] == list(range(9))


def test_a_get_that_brings_wrong_values_ends_the_comparison(tmp_path, monkeypatch):
    @contextlib.contextmanager
    def broken(job):
        yield {"broken": Turn(lambda _turn: None)}

    monkeypatch.setitem(compare.PEERS, "broken", broken)
    with pytest.raises(BenchError, match="broken: a get brought another value than was stored"):
        compare.compare(tmp_path, [GET], ["broken"], turns=1, workers=1)


def test_ratios_are_medians_over_turns_that_belong_together():
    times = {"limit": [1.0, 2.0, 4.0], "kvcsfs": [2.0, 2.0, 5.0]}
    limit, ours = compare._ratios(Work("get", 10**9, 1), times)
    assert (limit["of_limit"], limit["of_kvcsfs"], limit["gb_per_s"]) == (1.0, 1.25, 0.5)
    assert (ours["of_limit"], ours["median_ms"]) == (0.8, 2000)
