"""Small stand-ins for the engines' modules, with what the connectors use of them and nothing else.

The real ones are used in tests/engines; these let the connectors' own logic run where no engine is installed.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any


@contextmanager
def connector(name: str, modules: Mapping[str, Mapping[str, Any]]) -> Iterator[Any]:
    """The module `kvcsfs.connectors.<name>`, imported with fake modules in place of its engine's."""
    full = f"kvcsfs.connectors.{name}"
    made: dict[str, ModuleType] = {}
    for path, contents in modules.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):  # the packages that it lies in
            package = ".".join(parts[:end])
            made.setdefault(package, ModuleType(package))
        made[path].__dict__.update(contents)
    before = {module: sys.modules.pop(module, None) for module in (full, *made)}
    sys.modules.update(made)
    try:
        yield importlib.import_module(full)
    finally:
        for module, old in before.items():
            sys.modules.pop(module, None)
            if old is not None:
                sys.modules[module] = old


# -- torch and transformers


@dataclass(frozen=True)
class Dtype:
    name: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.name}"


BFLOAT16, FLOAT16, FLOAT32 = Dtype("bfloat16", 2), Dtype("float16", 2), Dtype("float32", 4)


class Tensor:
    """A contiguous tensor of bytes: enough to hand its memory around."""

    def __init__(self, shape: tuple[int, ...], dtype: Dtype, data: bytes | None = None) -> None:
        self.shape, self.dtype, self.device = shape, dtype, SimpleNamespace(type="cpu")
        self.memory = bytearray(self.numel() * dtype.itemsize) if data is None else bytearray(data)
        self.strided = False

    def numel(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count

    def element_size(self) -> int:
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def is_contiguous(self) -> bool:
        return not self.strided

    def contiguous(self) -> Tensor:
        return self if not self.strided else Tensor(self.shape, self.dtype, bytes(self.memory))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """The first tokens of [1, heads, tokens, dimension]."""
        *_, tokens = index
        _, heads, length, dimension = self.shape
        row, kept = dimension * self.dtype.itemsize, len(range(length)[tokens])
        data = b"".join(self.memory[h * length * row :][: kept * row] for h in range(heads))
        return Tensor((1, heads, kept, dimension), self.dtype, data)


class DynamicCache:
    def __init__(self) -> None:
        self.layers: list[Any] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> None:
        assert layer == len(self.layers)
        self.layers.append(SimpleNamespace(keys=keys, values=values, is_sliding=False))

    def get_seq_length(self) -> int:
        return int(self.layers[0].keys.shape[2]) if self.layers else 0


def empty(shape: tuple[int, ...], dtype: Dtype) -> Tensor:
    return Tensor(shape, dtype)


TRANSFORMERS = {"torch": {"empty": empty}, "transformers": {"DynamicCache": DynamicCache}}
