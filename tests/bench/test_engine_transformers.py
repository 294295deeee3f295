# ruff: noqa: E402  # what is imported when depends on what is there
"""transformers: a cache of 128 blocks through our prefix cache, and by hand with safetensors, a file a block.

transformers has no file backend of its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

from kvcsfs.connectors.transformers import KvcsPrefixCache
from tests.bench.engine_times import BATCHES_KEPT, PAGES, capacity, compare
from tests.engines.daemon import Daemon

pytestmark = [pytest.mark.bench, pytest.mark.engines]

BLOCK, HEADS, DIMENSION = 64, 8, 128  # 256 KiB a layer


@pytest.mark.parametrize("layers", [1, 4, 16])
def test_store_and_load(tmp_path: Path, layers: int):
    sizes = {"num_hidden_layers": layers, "num_key_value_heads": HEADS, "num_attention_heads": HEADS}
    config = SimpleNamespace(**sizes, hidden_size=HEADS * DIMENSION, name_or_path="m")
    model = SimpleNamespace(config=config, dtype=torch.bfloat16)
    shape = (1, HEADS, PAGES * BLOCK, DIMENSION)
    cache = transformers.DynamicCache()
    for layer in range(layers):
        halves = [torch.empty(shape, dtype=torch.bfloat16) for _ in range(2)]
        for half in halves:
            half.view(torch.int16).random_()
        cache.update(*halves, layer)
    page_bytes = 2 * layers * BLOCK * HEADS * DIMENSION * 2
    plain = tmp_path / "plain"
    plain.mkdir()

    def tokens(turn: int) -> list[int]:
        return list(range(turn << 20, (turn << 20) + PAGES * BLOCK + 1))

    def store_files(turn: int) -> None:
        for i in range(PAGES):
            of_block = slice(i * BLOCK, (i + 1) * BLOCK)
            tensors: dict[str, Any] = {}
            for n, layer in enumerate(cache.layers):
                tensors[f"{n}.k"] = layer.keys[:, :, of_block].contiguous()
                tensors[f"{n}.v"] = layer.values[:, :, of_block].contiguous()
            safetensors.save_file(tensors, plain / "new")
            os.rename(plain / "new", plain / f"{turn}-{i}")
            (plain / f"{turn - BATCHES_KEPT}-{i}").unlink(missing_ok=True)

    def load_files(turn: int) -> None:
        blocks = [safetensors.load_file(plain / f"{turn}-{i}") for i in range(PAGES)]
        loaded = transformers.DynamicCache()
        for n in range(layers):
            halves = [torch.cat([block[f"{n}.{half}"] for block in blocks], dim=2) for half in "kv"]
            loaded.update(*halves, n)

    with Daemon(tmp_path / "store", capacity(page_bytes + 4096)) as daemon:
        ours = KvcsPrefixCache(model, block_tokens=BLOCK, socket=daemon.socket)

        def store(turn: int) -> None:
            assert ours.save(tokens(turn), cache) == PAGES
            assert ours.flush(60)

        def load(turn: int) -> None:
            assert ours.restore(tokens(turn)).get_seq_length() == PAGES * BLOCK

        compare(
            "transformers", page_bytes, {"kvcsfs": (store, load), "safetensors": (store_files, load_files)}
        )
        ours.close()
