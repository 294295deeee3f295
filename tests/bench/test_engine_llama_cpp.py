"""llama.cpp: slot states to and from its slot directory, that on the mount and a plain one."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

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


def steps(server: LlamaEngine, slots: Path) -> tuple[Step, Step]:
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
        stack.enter_context(Daemon(tmp_path / "store", room, mount=tmp_path / "mnt"))
        contestants = {}
        for name, slots in (("on the mount", tmp_path / "mnt" / "slots"), ("plain", tmp_path / "plain")):
            slots.mkdir()
            server = LlamaEngine(find_model(), slots, context_tokens=512, log=tmp_path / "llama.log")
            stack.callback(server.stop)
            server.compute(list(range(1000, 1000 + tokens)), lambda done, total: None)
            contestants[name] = steps(server, slots)
        compare("llama.cpp", size, contestants, SLOTS)
