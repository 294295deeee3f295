"""llama.cpp's own slot files with its slot directory on the mount, beside a server that has a plain directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from llama_engine import EngineError, LlamaEngine, find_model
from tests.engines.file_backends import ON_THE_MOUNT, SCENARIOS

pytestmark = ON_THE_MOUNT

PROMPTS, TOKENS = 12, 4
SLOT_BYTES = TOKENS * 23040 + 2048  # SmolLM2-135M, f16


class Slots:
    """A number stands for one of a few prompts; its value is the slot file that the other server makes of that."""

    def __init__(self, server: LlamaEngine, slots: Path, other: LlamaEngine, other_slots: Path) -> None:
        self._server, self._slots = server, slots
        self._other, self._other_slots = other, other_slots
        self._values: dict[int, bytes] = {}

    def value(self, number: int) -> bytes:
        prompt = number % PROMPTS
        if prompt not in self._values:
            self._compute(self._other, prompt)
            self._other.save("slot")
            self._values[prompt] = (self._other_slots / "slot").read_bytes()
            assert len(self._values[prompt]) <= SLOT_BYTES
        return self._values[prompt]

    def put(self, number: int) -> bool:
        self._compute(self._server, number % PROMPTS)
        try:
            self._server.save(f"prompt{number}")
        except EngineError:
            return False
        return True

    def get(self, number: int) -> bytes | None:
        """Restore it. What the server then has, it is asked to write again, until that isn't evicted at once."""
        self._server.erase()
        try:
            self._server.restore(f"prompt{number}")
        except EngineError:
            return None
        for _ in range(5):
            try:
                self._server.save("again")
                return (self._slots / "again").read_bytes()
            except (EngineError, FileNotFoundError):
                continue
        raise OSError("the restored slot can't be written")

    def _compute(self, server: LlamaEngine, prompt: int) -> None:
        server.erase()
        server.compute([1000 + prompt, *range(2000, 2000 + TOKENS - 1)], lambda done, total: None)


@contextmanager
def opened(directory: Path) -> Iterator[Slots]:
    directory.mkdir(parents=True)
    plain = directory.parents[2] / "plain"
    plain.mkdir()
    with ExitStack() as stack:

        def start(slots: Path) -> LlamaEngine:
            made = LlamaEngine(find_model(), slots, context_tokens=256, log=plain / "llama.log")
            stack.callback(made.stop)
            return made

        yield Slots(start(directory), directory, start(plain), plain)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_slot_files_on_the_mount(tmp_path, scenario):
    scenario(tmp_path, opened, SLOT_BYTES)
