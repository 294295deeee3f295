"""transformers' cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.connectors.fakes.torch import Tensor, empty


class DynamicCache:
    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.copied_tokens = 0  # the real one joins what it is given to what it has, in fresh memory

    def update(self, keys: Tensor, values: Tensor, layer: int) -> None:
        assert layer == len(self.layers)
        self.copied_tokens += keys.shape[2]
        self.layers.append(SimpleNamespace(keys=keys, values=values, is_sliding=False))

    def get_seq_length(self) -> int:
        return int(self.layers[0].keys.shape[2]) if self.layers else 0


TRANSFORMERS = {"torch": {"empty": empty}, "transformers": {"DynamicCache": DynamicCache}}
