"""The llama.cpp helper with the real server and SmolLM2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvcs import KvcsLowLevelClient
from kvcsfs.connectors.keys import prefix_hashes
from kvcsfs.connectors.llama_cpp import LlamaPrefixCache
from llama_engine import LlamaEngine, find_model
from tests.engines.daemon import Daemon

pytestmark = pytest.mark.engines

SLOT_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 2  # SmolLM2-135M, f16


class Setup:
    """A daemon without a mount, and engines with a slot directory of their own."""

    def __init__(self, home: Path, stack: ExitStack, capacity: int) -> None:
        self._home, self._stack = home, stack
        self.daemon = stack.enter_context(Daemon(home, capacity))
        self.slots = home / "slots"
        self.prefixes = self._prefixes("http://127.0.0.1:9")  # makes the directory

    def engine(self) -> LlamaEngine:
        made = LlamaEngine(find_model(), self.slots, context_tokens=1024, log=self._home / "llama.log")
        self._stack.callback(made.stop)
        self.prefixes = self._prefixes(made._url)
        return made

    def _prefixes(self, url: str) -> LlamaPrefixCache:
        made = LlamaPrefixCache(
            url, "smollm2-135m-q4", self.slots, layout="ctx1024", step_tokens=64, socket=self.daemon.socket
        )
        self._stack.callback(made.close)
        return made


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def prompt(engine: LlamaEngine, count: int, about: str = "patience") -> list[int]:
    text = "".join(f"Rule {i}: be kind, be brief, and think of {about} {i} times.\n" for i in range(count))
    return engine.tokenize(text)[:count]


def test_a_new_engine_process_continues_from_the_longest_stored_prefix(tmp_path, stack):
    setup = Setup(tmp_path, stack, 512 << 20)
    first = setup.engine()
    tokens, question = prompt(first, 300), first.tokenize("\nWhat matters most?\nAnswer:")
    assert setup.prefixes.warm(tokens) == 0
    computed = first.ask(tokens + question).text
    assert computed
    lengths = [64, 128, 256, 300]
    names = prefix_hashes(tokens, lengths)
    with KvcsLowLevelClient(setup.daemon.socket) as client:
        found = client.ll_batch_query(
            [f"smollm2-135m-q4/v1/llama.cpp/f16/ctx1024/all/{name}" for name in names]
        )
    for length, result in zip(lengths, found, strict=True):
        assert result.total_size >= length * SLOT_BYTES_PER_TOKEN
    assert list(setup.slots.iterdir()) == []
    first.stop()
    second = setup.engine()
    assert setup.prefixes.warm(tokens) == 300
    assert second.ask(tokens + question).text == computed
    other = tokens[:200] + prompt(second, 60, "courage")
    second.erase()
    assert setup.prefixes.warm(other) == 128
    restored = second.ask(other + question).text
    second.erase()
    assert second.ask(other + question).text == restored


def test_a_killed_daemon_and_an_evicted_prefix_cost_the_computation_alone(tmp_path, stack):
    setup = Setup(tmp_path, stack, 32 << 20)
    engine = setup.engine()
    tokens, question = prompt(engine, 100), engine.tokenize("\nAnswer:")
    setup.prefixes.warm(tokens)
    computed = engine.ask(tokens + question).text
    engine.erase()
    setup.daemon.kill()
    assert setup.prefixes.warm(tokens) == 0
    assert engine.ask(tokens + question).text == computed
    setup.daemon.start()
    engine.erase()
    assert setup.prefixes.warm(tokens) == 100
    assert engine.ask(tokens + question).text == computed
    for i in range(12):  # other prompts push it out: 4 MB each
        setup.prefixes.warm(prompt(engine, 110, f"topic {i}"))
    engine.erase()
    assert setup.prefixes.warm(tokens) == 0
    assert engine.ask(tokens + question).text == computed
