"""llama.cpp: slot states to and from the store, by the helper and on the mount, and to and from a plain directory."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvcsfs.connectors.llama_cpp import LlamaPrefixCache
from llama_engine import LlamaEngine, find_model
from tests.bench.engine_times import BATCHES_KEPT, Step, capacity, compare
from tests.engines.daemon import Daemon

pytestmark = [
    pytest.mark.bench,
    pytest.mark.engines,
    pytest.mark.mount,
]

SLOTS = 16  # a server's conversations that are put aside and taken up again
BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 2  # SmolLM2-135M, f16


def by_the_helper(prefixes: LlamaPrefixCache) -> tuple[Step, Step]:
    """What `warm` does besides computing."""

    def store(turn: int) -> None:
        for i in range(SLOTS):
            prefixes._save(f"slots/{turn}-{i}")
        assert prefixes.flush(30)

    def load(turn: int) -> None:
        for i in range(SLOTS):
            key = f"slots/{turn}-{i}"
            assert prefixes._restore([(1, key, *prefixes._store.sizes([key]))])

    return store, load


def by_files(server: LlamaEngine, slots: Path) -> tuple[Step, Step]:
    """Both directories hold the files of the last turns alone; who evicts is the store or, here, this test."""

    def store(turn: int) -> None:
        for i in range(SLOTS):
            server.save(f"{turn}-{i}")
            old = slots / f"{turn - BATCHES_KEPT}-{i}"
            old.unlink(missing_ok=True)

    def load(turn: int) -> None:
        for i in range(SLOTS):
            server.restore(f"{turn}-{i}")

    return store, load


@pytest.mark.parametrize("tokens", [12, 46, 182])
def test_store_and_load(tmp_path: Path, tokens: int):
    size = tokens * BYTES_PER_TOKEN
    with ExitStack() as stack:
        room = capacity(size + (64 << 10), SLOTS)
        # A store for each way: they would evict each other's.
        daemon = stack.enter_context(Daemon(tmp_path / "store", room))
        stack.enter_context(Daemon(tmp_path / "mounted", room, mount=tmp_path / "mnt"))
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))

        def started(slots: Path) -> LlamaEngine:
            slots.mkdir(exist_ok=True)
            server = LlamaEngine(find_model(), slots, context_tokens=512, log=tmp_path / "llama.log")
            stack.callback(server.stop)
            server.compute(list(range(1000, 1000 + tokens)), lambda done, total: None)
            return server

        prefixes = LlamaPrefixCache(started(memory)._url, "smollm2", memory, socket=daemon.socket)
        stack.callback(prefixes.close)
        contestants = {"kvcsfs": by_the_helper(prefixes)}
        for name, slots in (("on the mount", tmp_path / "mnt" / "slots"), ("plain", tmp_path / "plain")):
            contestants[name] = by_files(started(slots), slots)
        compare("llama.cpp", size, contestants, SLOTS)
