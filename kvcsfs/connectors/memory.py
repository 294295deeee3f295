"""Memory that engines name by address, as buffers."""

from __future__ import annotations

import ctypes
from typing import Any


def view_at(address: int, size: int) -> memoryview:
    """The `size` bytes at `address`, writable. Valid as long as whoever owns the memory keeps it."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def view_of(tensor: Any) -> memoryview:
    """The bytes of a contiguous tensor in the host's memory; any dtype, also those that numpy lacks.

    Raises:
        ValueError: it isn't contiguous, or in a device's memory.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"the tensor is in the memory of a device, {tensor.device.type}")
    if not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous in memory")
    return view_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
