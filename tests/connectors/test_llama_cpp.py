"""The llama.cpp helper with a small server that behaves as llama.cpp's does, on a real daemon."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvcs import KvcsLowLevelClient
from kvcsfs.connectors.keys import prefix_hashes
from kvcsfs.connectors.llama_cpp import LlamaPrefixCache
from tests.engines.daemon import Daemon

TOKENS = list(range(3000, 3100))


class Server:
    """One slot, whose files are in `slots`."""

    def __init__(self, slots: Path) -> None:
        self.slot: list[int] = []
        self.computed = 0
        self.saves: list[int] = []
        self.dies = False
        self.broken = False  # it then refuses a state, and leaves half of one
        self.late: list[tuple[Path, bytes]] | None = None  # saves that it does before the next restore
        self._slots = slots
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200 if outer.answer(self.path, body) else 400)
                if outer.dies:
                    self.send_header("Content-Length", "100")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Quiet."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def answer(self, path: str, body: dict[str, object]) -> bool:
        try:
            return self._move(path, body) if path.startswith("/slots/0?action=") else self._complete(body)
        except OSError:
            return False

    def _complete(self, body: dict[str, object]) -> bool:
        prompt = body["prompt"]
        assert (body["n_predict"], body["cache_prompt"], body["id_slot"]) == (0, True, 0)
        assert isinstance(prompt, list)
        known = self.slot == prompt[: len(self.slot)]
        self.computed += len(prompt) - (len(self.slot) if known else 0)
        self.slot = prompt
        return True

    def _move(self, path: str, body: dict[str, object]) -> bool:
        action, file = path.rpartition("=")[2], self._slots / str(body.get("filename"))
        if action == "erase":
            self.slot = []
        elif action == "save":
            self.saves.append(len(self.slot))
            state = json.dumps(self.slot).encode() + b" " * 4000
            if self.late is not None:
                self.late.append((file, state))
                return False
            file.write_bytes(state[:9] if self.broken else state)
        else:
            for saved, state in self.late or ():
                saved.write_bytes(state)
            self.slot = [0]
            self.slot = [0] if self.broken else json.loads(file.read_bytes())
        return action == "erase" or not self.broken

    def stop(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


@pytest.fixture
def slots(tmp_path: Path) -> Path:
    return tmp_path / "memory" / "slots"


@pytest.fixture
def server(slots: Path) -> Iterator[Server]:
    made = Server(slots)
    yield made
    made.stop()


@pytest.fixture
def prefixes(server: Server, daemon: Daemon, slots: Path) -> Iterator[LlamaPrefixCache]:
    made = LlamaPrefixCache(server.url, "smollm", slots, step_tokens=16, socket=daemon.socket)
    yield made
    made.close()
    assert list(slots.iterdir()) == []  # whatever happened, nothing stays


def test_a_prompt_is_stored_at_several_lengths_and_restored_whole(server, prefixes):
    assert prefixes.warm(TOKENS) == 0
    assert (server.slot, server.computed, server.saves) == (TOKENS, 100, [16, 32, 64, 100])
    prefixes.erase()
    assert prefixes.warm(TOKENS) == 100
    assert (server.slot, server.computed, len(server.saves)) == (TOKENS, 100, 4)


def test_a_prompt_that_shares_a_part_reuses_the_longest_stored_prefix(server, prefixes):
    prefixes.warm(TOKENS)
    prefixes.erase()
    other = TOKENS[:70] + [1] * 20
    assert prefixes.warm(other) == 64
    assert (server.slot, server.computed, server.saves[4:]) == (other, 100 + 26, [90])
    longer = [*TOKENS, *TOKENS]
    assert prefixes.warm(longer) == 64  # the full prompt's own length is no step of the longer one
    assert prefixes.warm([1, *TOKENS]) == 0
    assert prefixes.flush(30)
    counts = prefixes.stats()
    assert (counts["restored"], counts["saved"]) == (2, 4 + 1 + 2 + 4)


def test_a_prefix_evicted_between_query_and_read_falls_back_to_a_shorter_one(server, prefixes, daemon):
    prefixes.warm(TOKENS)
    sizes = prefixes._store.sizes
    with KvcsLowLevelClient(daemon.socket) as client:
        gone = [f"smollm/v1/llama.cpp/f16/any/all/{name}" for name in prefix_hashes(TOKENS, [64, 100])]

        def evicted_afterwards(keys: list[str]) -> list[int]:
            found: list[int] = sizes(keys)
            assert [result.status for result in client.ll_batch_delete(gone)] == [0, 0]
            return found

        prefixes._store.sizes = evicted_afterwards
        assert prefixes.warm(TOKENS) == 32
    assert (server.slot, server.computed) == (TOKENS, 168)
    assert prefixes.stats()["misses"] == 2


def test_a_daemon_killed_in_the_middle_costs_the_computation_alone(server, prefixes, daemon):
    prefixes.warm(TOKENS)
    assert prefixes.flush(30)
    daemon.kill()
    prefixes.erase()
    assert prefixes.warm(TOKENS) == 0
    assert prefixes.flush(30)
    assert (server.slot, prefixes.stats()["save_failed"]) == (TOKENS, 4)
    daemon.start()
    prefixes.erase()
    assert prefixes.warm(TOKENS) == 100
    assert server.slot == TOKENS


def test_a_server_that_is_gone_raises_nothing(daemon, slots):
    prefixes = LlamaPrefixCache("http://127.0.0.1:9", "smollm", slots, socket=daemon.socket)
    assert (prefixes.warm(TOKENS), prefixes.warm([]), prefixes.erase()) == (0, 0, False)
    assert prefixes.stats()["server_failed"] == 2
    prefixes.close()


def test_a_server_that_dies_as_it_answers_raises_nothing(server, prefixes):
    server.dies = True
    assert prefixes.warm(TOKENS) == 0
    assert prefixes.stats()["server_failed"] == 1
    server.dies = False


def test_tokens_may_be_any_integers(server, prefixes):
    class Number:
        """As numpy's int64: an integer that json can't write."""

        def __init__(self, value: int) -> None:
            self.value = value

        def __index__(self) -> int:
            return self.value

    assert prefixes.warm([Number(token) for token in TOKENS]) == 0
    assert server.slot == TOKENS


@pytest.mark.parametrize("token", [-1, 1 << 32, 1.5, "the", "12"])
def test_what_is_no_token_raises_nothing(prefixes, server, token):
    assert prefixes.warm([*TOKENS, token]) == 0
    assert (server.slot, prefixes.stats()) == (
        [],
        {"errors": 1, "restore_failed": 1, "dropped": 0, "queued_bytes": 0},
    )


def test_a_server_that_refuses_states_computes(server, prefixes):
    server.broken = True
    assert prefixes.warm(TOKENS) == 0
    assert (server.slot, prefixes.stats()["save_failed"]) == (TOKENS, 4)
    server.broken = False
    prefixes.erase()
    prefixes.warm(TOKENS)
    server.broken = True
    assert prefixes.warm(TOKENS) == 0
    assert server.slot == TOKENS
    assert "restored" not in prefixes.stats()


def test_a_save_that_is_done_late_takes_no_other_states_place(server, prefixes):
    prefixes.warm(TOKENS)
    server.late = []
    prefixes.warm([1] * 20)
    assert len(server.late) == 2
    assert prefixes.warm(TOKENS) == 100
    assert server.slot == TOKENS
    server.late = None
    prefixes.warm([2] * 10)  # the next save takes the late one's file away


def test_a_server_with_another_directory_is_told_of_and_restores_nothing(server, daemon, tmp_path, caplog):
    other = tmp_path / "other"
    prefixes = LlamaPrefixCache(server.url, "smollm", other, step_tokens=16, socket=daemon.socket)
    server._slots.mkdir(parents=True)
    assert prefixes.warm(TOKENS) == 0
    assert (server.slot, prefixes.stats()["save_failed"]) == (TOKENS, 4)
    assert f"is {other} the server's --slot-save-path?" in caplog.text
    prefixes.close()


def test_no_room_for_a_state_costs_the_computation_alone(server, prefixes, monkeypatch):
    prefixes.warm(TOKENS)
    prefixes.erase()

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        assert prefixes.warm(TOKENS) == 0
    assert (server.slot, prefixes.stats()["restore_failed"]) == (TOKENS, 4)


def test_a_state_is_restored_into_the_file_of_the_last_one(server, prefixes):
    prefixes.warm(TOKENS[:20])
    prefixes.warm(TOKENS)
    files = []
    for tokens in (TOKENS, TOKENS[:20], TOKENS):  # it shrinks and grows again
        prefixes.erase()
        assert prefixes.warm(tokens) == len(tokens)
        assert server.slot == tokens
        files.append(prefixes._loaded.stat().st_ino)
    assert len(set(files)) == 1


@pytest.mark.parametrize("refused", [False, True])
def test_a_large_state_or_one_that_was_refused_leaves_no_file(server, prefixes, monkeypatch, refused):
    prefixes.warm(TOKENS)
    prefixes.erase()
    if refused:
        server.broken = True
    else:
        monkeypatch.setattr("kvcsfs.connectors.llama_cpp.KEPT_BYTES", 4000)
    assert prefixes.warm(TOKENS) == (0 if refused else 100)
    assert not prefixes._loaded.exists()


def test_warm_does_not_wait_for_the_store_and_the_next_one_finds_what_it_saved(server, prefixes, monkeypatch):
    client = prefixes._store.client
    put, may_put = client.ll_batch_put, threading.Event()

    def late_put(*args: object) -> object:
        assert may_put.wait(30)
        return put(*args)

    monkeypatch.setattr(client, "ll_batch_put", late_put)
    assert prefixes.warm(TOKENS[:8]) == 0
    assert not prefixes.flush(0.05)
    threading.Timer(0.1, may_put.set).start()
    prefixes.erase()
    assert prefixes.warm(TOKENS[:8]) == 8
    assert server.slot == TOKENS[:8]


def test_another_slot_or_server_has_another_file(prefixes, server, slots, daemon):
    others = [
        LlamaPrefixCache(url, "smollm", slots, slot=slot, socket=daemon.socket)
        for url, slot in ((server.url, 0), (server.url, 1), ("http://127.0.0.1:9", 0))
    ]
    assert len({file for made in others for file in (made._saved, made._loaded)}) == 6
    assert (prefixes._saved, prefixes._loaded) == (others[0]._saved, others[0]._loaded)
    for made in others:
        made.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": ""}, "no name"),
        ({"step_tokens": 0}, "at least 1, not 0"),
        ({"sokcet": ""}, "unknown option 'sokcet'"),
        ({"slots": "/dev/null/slots"}, "slots: /dev/null/slots: Not a directory"),
    ],
)
def test_wrong_arguments_are_refused(options, said, slots):
    with pytest.raises(ValueError, match=said):
        LlamaPrefixCache("http://127.0.0.1:9", **{"model": "m", "slots": slots} | options)
