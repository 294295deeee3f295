# ruff: noqa: E402  # the engine is imported once it is known to be there
"""vLLM's own file tier with its directory on the mount."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.engines.file_backends import ON_THE_MOUNT, SCENARIOS, random_value

np = pytest.importorskip("numpy")
pytest.importorskip("torch")
pytest.importorskip("vllm")

from tests.engines.test_vllm_engine import BLOCK, Tier, key

pytestmark = ON_THE_MOUNT


class Files:
    """A block at a time: stored from the first place of the host memory, loaded into the second."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def value(self, number: int) -> bytes:
        return random_value(number, BLOCK)

    def put(self, number: int) -> bool:
        self._tier.memory[0] = np.frombuffer(self.value(number), dtype=np.uint8)
        stored: bool = self._tier.run(self._tier.tier.submit_store, [key(number)], [0]).success
        return stored

    def get(self, number: int) -> bytes | None:
        if self._tier.look([key(number)]) == ["MISS"]:
            return None
        self._tier.memory[1] = 0
        done = self._tier.run(self._tier.tier.submit_load, [key(number)], [1])
        return self._tier.memory[1].tobytes() if done.success else None


@contextmanager
def opened(directory: Path, direct: bool) -> Iterator[Files]:
    made = Tier({"type": "fs", "root_dir": str(directory), "n_read_threads": 2, "n_write_threads": 2})
    assert made.tier._use_o_direct  # its probe of the mount
    made.tier._use_o_direct = direct  # false: as it decides by itself on a file system without
    yield Files(made)
    made.tier.drain_jobs()
    made.tier.shutdown()


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_the_file_tier_on_the_mount(tmp_path, scenario, direct):
    scenario(tmp_path, partial(opened, direct=direct), BLOCK)
