"""Torch's types and tensors: bytes, with what the connectors use of them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import SimpleNamespace


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


def empty(shape: tuple[int, ...], dtype: Dtype) -> Tensor:
    return Tensor(shape, dtype)
