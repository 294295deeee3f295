"""What integrators write: the examples of docs/sdk.md, and the call shapes of code made for the product's SDK."""

from __future__ import annotations

import errno
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcs import KvcsError, KvcsLowLevelClient, LLBatchOptions, LLGetItemOpt, LLPutItem

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
[store]
socket = "{folder}/kvcs.sock"
backend = "{backend}"
[[mountpoints]]
path = "{folder}/first"
capacity = "64MiB"
[[mountpoints]]
path = "{folder}/second"
capacity = "64MiB"
"""


@pytest.fixture(params=["direct", "pooled"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def socket(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A daemon with two mountpoints; `KVCS_SOCKET` names its socket."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    config = tmp_path / "kvcsfs.toml"
    config.write_text(CONFIG.format(folder=tmp_path, backend=backend))
    command = [sys.executable, "-m", "kvcsfs.cli", "serve", "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert b"ready" in process.stdout.readline()
        monkeypatch.setenv("KVCS_SOCKET", str(tmp_path / "kvcs.sock"))
        yield str(tmp_path / "kvcs.sock")
        process.terminate()
        assert process.wait(20) == 0


def example(heading: str, **names: Any) -> dict[str, Any]:
    """Run the code below a heading of docs/sdk.md; returns what it defines."""
    text = (ROOT / "docs" / "sdk.md").read_text()
    code = re.search(rf"^#+ {heading}.*?^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert code, heading
    exec(code[1], names)
    return names


def test_the_first_example(socket, capsys):
    example("The `kvcs` SDK")
    assert "keys and values" in capsys.readouterr().out


def test_the_prefix_cache_computes_once(socket):
    with KvcsLowLevelClient(socket) as client:
        lookup = example("Prefix caching")["kv_cache_for"]
        computed: list[list[int]] = []

        def compute(tokens: list[int]) -> bytes:
            computed.append(tokens)
            return b"kv" * 1000

        assert [bytes(lookup(client, [1, 2, 3], compute)) for _ in range(3)] == [b"kv" * 1000] * 3
        assert computed == [[1, 2, 3]]
    with KvcsLowLevelClient(socket + ".gone") as client:
        assert lookup(client, [1, 2, 3], compute) == b"kv" * 1000
        assert len(computed) == 2


def test_reading_into_buffers_that_stay(socket):
    names = example("Reading fast")
    with names["client"] as client:
        client.ll_batch_put([LLPutItem(f"m/{i}", bytes([i + 1]) * 70_000) for i in range(5)])
        seen: dict[str, bytes] = {}
        keys = ["m/0", "m/none", "m/4"]
        assert names["load"](keys, lambda key, view: seen.update({key: bytes(view)})) == 2
        assert seen == {"m/0": b"\1" * 70_000, "m/4": b"\5" * 70_000}
    assert names["load"](keys, lambda key, view: None) == 0, "a closed client is a miss"


def test_several_file_systems(socket, backend):
    with KvcsLowLevelClient(socket) as client:
        names = example("Several file systems", client=client, block=b"x" * 5000)
        assert [r.status for r in names["results"]] == [0]
        (elsewhere,) = client.ll_batch_query(["model-b/v1/layer-0/block-7"])
        assert elsewhere.exists == (backend == "direct")
        third = LLBatchOptions(mountpoint_index=2)
        statuses = [r.status for r in client.ll_batch_put([LLPutItem("k", b"v")], opts=third)]
        assert statuses == [0 if backend == "direct" else -errno.ENODEV]


def test_writing_back(socket):
    free: list[bytearray] = []
    with KvcsLowLevelClient(socket) as client:
        names = example("Writing back", client=client, free_blocks=free)
        for i in range(20):
            names["after_prefill"](f"m/{i}", bytearray(b"b" * 1000))
        assert names["queue"].flush(10)
        names["queue"].close()
        assert len(free) == 20
        assert all(r.exists for r in client.ll_batch_query([f"m/{i}" for i in range(20)]))


def test_code_made_for_the_products_sdk_runs(socket):
    """Keywords, status comparisons and the exceptions that such code catches."""
    client = KvcsLowLevelClient(efc_socket=socket, max_value_size=1 << 20)
    found = client.ll_batch_query(["model-a/v1/prefix/1"])
    assert (found[0].status == "ok") is False
    stored = client.ll_batch_put([LLPutItem(key="model-a/v1/prefix/1", value=b"kv" * 9)], deadline_s=10.0)
    assert stored[0].status == 0
    assert client.ll_batch_query(["model-a/v1/prefix/1"])[0].status == "ok"
    got = client.ll_batch_get_items([LLGetItemOpt(key="model-a/v1/prefix/1")], deadline_s=10.0)
    assert got[0].status == 18
    assert got[0].data == b"kv" * 9

    buffers = [bytearray(1 << 20) for _ in range(4)]

    def read(keys: list[str]) -> list[bytes | None]:
        chosen = buffers[: len(keys)]
        try:
            results = client.ll_batch_get_into_items(
                [LLGetItemOpt(key=key) for key in keys], chosen, deadline_s=10.0
            )
        except (KvcsError, ValueError):
            return [None] * len(keys)
        return [bytes(chosen[i][: r.status]) if r.status > 0 else None for i, r in enumerate(results)]

    assert read(["model-a/v1/prefix/1", "model-a/v1/none"]) == [b"kv" * 9, None]
    assert read(["too", "many", "keys", "for", "them"]) == [None] * 5
    client.close()
    assert read(["model-a/v1/prefix/1"]) == [None]


def test_a_writer_thread_of_ones_own(socket):
    client = KvcsLowLevelClient(efc_socket=socket)
    waiting: queue.Queue[tuple[str, bytes] | None] = queue.Queue(maxsize=2)
    counts = {"ok": 0, "failed": 0, "dropped": 0}

    def write() -> None:
        while (item := waiting.get()) is not None:
            results = client.ll_batch_put([LLPutItem(key=item[0], value=item[1])], deadline_s=1.0)
            counts["ok" if results[0].status == 0 else "failed"] += 1

    for i in range(3):
        try:
            waiting.put_nowait((f"m/{i}", b"x"))
        except queue.Full:
            counts["dropped"] += 1
    thread = threading.Thread(target=write)
    thread.start()
    waiting.put(None)
    thread.join()
    client.close()
    assert counts == {"ok": 2, "failed": 0, "dropped": 1}
