"""The llama.cpp helper with a small server that behaves as llama.cpp's does, on a real daemon."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvcs import KvcsError, KvcsLowLevelClient, LLGetItemOpt, LLPutItem
from kvcsfs.connectors.llama_cpp import LlamaPrefixCache
from tests.engines.daemon import Daemon

TOKENS = list(range(3000, 3100))


class Server:
    """One slot. It writes and reads its slot files through the SDK, where the real one has the mount."""

    def __init__(self, socket: str, prefix: str) -> None:
        self.slot: list[int] = []
        self.computed = 0
        self.saves: list[int] = []
        self._prefix = prefix
        self._client = KvcsLowLevelClient(socket)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200 if outer.answer(self.path, body) else 400)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Quiet."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def answer(self, path: str, body: dict[str, object]) -> bool:
        try:
            return self._slots(path, body) if path.startswith("/slots/0?action=") else self._complete(body)
        except KvcsError:
            return False

    def _complete(self, body: dict[str, object]) -> bool:
        prompt = body["prompt"]
        assert (body["n_predict"], body["cache_prompt"], body["id_slot"]) == (0, True, 0)
        assert isinstance(prompt, list)
        known = self.slot == prompt[: len(self.slot)]
        self.computed += len(prompt) - (len(self.slot) if known else 0)
        self.slot = prompt
        return True

    def _slots(self, path: str, body: dict[str, object]) -> bool:
        action, key = path.rpartition("=")[2], f"{self._prefix}{body.get('filename')}"
        if action == "erase":
            self.slot = []
        elif action == "save":
            self.saves.append(len(self.slot))
            value = json.dumps(self.slot).encode() + b" " * 4000
            return self._client.ll_batch_put([LLPutItem(key, value)])[0].status == 0
        else:
            (got,) = self._client.ll_batch_get_items([LLGetItemOpt(key)])
            self.slot = json.loads(got.data) if got.data else [0]
            return got.data is not None
        return True

    def stop(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        self._client.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("store"), 64 << 20) as made:
        yield made


@pytest.fixture
def daemon(running: Daemon) -> Daemon:
    running.empty()
    return running


@pytest.fixture
def server(daemon: Daemon) -> Iterator[Server]:
    made = Server(daemon.socket, "smollm/v1/llama.cpp/f16/any/all/")
    yield made
    made.stop()


@pytest.fixture
def prefixes(server: Server, daemon: Daemon) -> Iterator[LlamaPrefixCache]:
    made = LlamaPrefixCache(server.url, "smollm", step_tokens=16, socket=daemon.socket)
    yield made
    made.close()


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
    counts = prefixes.stats()
    assert (counts["restored"], counts["saved"]) == (2, 4 + 1 + 2 + 4)


def test_a_prefix_evicted_between_query_and_read_falls_back_to_a_shorter_one(server, prefixes, daemon):
    prefixes.warm(TOKENS)
    whole = prefixes._store.exists
    prefixes._store.exists = lambda keys: [True] * len(keys)  # what the query said before the eviction
    with KvcsLowLevelClient(daemon.socket) as client:
        from kvcsfs.connectors.keys import prefix_hashes

        gone = [f"smollm/v1/llama.cpp/f16/any/all/{name}" for name in prefix_hashes(TOKENS, [64, 100])]
        assert [result.status for result in client.ll_batch_delete(gone)] == [0, 0]
    assert prefixes.warm(TOKENS) == 32
    assert (server.slot, server.computed) == (TOKENS, 168)
    prefixes._store.exists = whole
    assert prefixes.stats()["misses"] == 2


def test_a_daemon_killed_in_the_middle_costs_the_computation_alone(server, prefixes, daemon):
    prefixes.warm(TOKENS)
    daemon.kill()
    prefixes.erase()
    assert prefixes.warm(TOKENS) == 0
    assert (server.slot, prefixes.stats()["save_failed"]) == (TOKENS, 4)
    daemon.start()
    prefixes.erase()
    assert prefixes.warm(TOKENS) == 100
    assert server.slot == TOKENS


def test_a_server_that_is_gone_raises_nothing(daemon):
    prefixes = LlamaPrefixCache("http://127.0.0.1:9", "smollm", socket=daemon.socket)
    assert (prefixes.warm(TOKENS), prefixes.warm([]), prefixes.erase()) == (0, 0, False)
    assert prefixes.stats()["server_failed"] == 2
    prefixes.close()


def test_the_slot_directory_is_where_the_keys_are(prefixes, tmp_path):
    directory = prefixes.slot_directory(tmp_path / "mnt")
    assert directory == tmp_path / "mnt/smollm/v1/llama.cpp/f16/any/all"
    assert directory.is_dir()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": ""}, "no name"),
        ({"step_tokens": 0}, "at least 1, not 0"),
        ({"sokcet": ""}, "unknown option 'sokcet'"),
    ],
)
def test_wrong_arguments_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        LlamaPrefixCache("http://127.0.0.1:9", **{"model": "m"} | options)
