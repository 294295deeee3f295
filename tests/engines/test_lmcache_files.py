# ruff: noqa: E402, I001  # the engine is imported once it is known to be there
"""LMCache's remote connector `fs` and its L2 adapters `fs` and `fs_native`, with their directory on the mount."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache")

from tests.engines.file_backends import ON_THE_MOUNT, SCENARIOS, random_value
from tests.engines.test_lmcache_engine import (
    CHUNK,
    MODEL,
    SHAPE,
    adapter,
    backend,
    key,
    load,
    look,
    store,
)
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat

pytestmark = ON_THE_MOUNT


class Connector:
    """A chunk at a time through the remote backend."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def value(self, number: int) -> bytes:
        return random_value(number, CHUNK)

    def put(self, number: int) -> bool:
        memory = self._made.local_cpu_backend.allocate([SHAPE], [torch.bfloat16], MemoryFormat.KV_2LTD)
        ctypes.memmove(memory.data_ptr, self.value(number), CHUNK)
        failed = self._made.submit_put_task(key(number), memory).exception(30)
        forget(memory)
        assert failed is None or isinstance(failed, OSError)
        return failed is None

    def get(self, number: int) -> bytes | None:
        memory = self._made.get_blocking(key(number))
        if memory is None:
            return None
        value = ctypes.string_at(memory.data_ptr, CHUNK)
        forget(memory)
        return value


def forget(memory: Any) -> None:
    """Give memory back without the value, so that a load into it again has to bring all of it."""
    ctypes.memset(memory.data_ptr, 0, CHUNK)
    memory.ref_count_down()


@contextmanager
def connector(directory: Path, **options: Any) -> Iterator[Connector]:
    directory.mkdir(parents=True)  # with direct I/O it asks for the block size before it makes the directory
    extra = {"remote_storage_plugin.fs.base_path": str(directory)} | options
    with backend({"remote_storage_plugins": ["fs"], "extra_config": extra}) as made:
        yield Connector(made)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fs_connector_relative_tmp_dir": "tmp"},
        {"fs_connector_read_ahead_size": 65536, "save_chunk_meta": False},
        {"fs_connector_use_odirect": True, "save_chunk_meta": False},
    ],
    ids=["plain", "tmpdir", "readahead", "direct"],
)
def test_the_fs_connector_on_the_mount(tmp_path, scenario, options):
    scenario(tmp_path, partial(connector, **options), CHUNK)


class Adapter:
    """An object at a time through an L2 adapter."""

    def __init__(self, made: Any) -> None:
        self._made = made
        # Aligned to pages, as direct I/O wants it and LMCache's server has it.
        memory = TensorMemoryAllocator(torch.frombuffer(mmap.mmap(-1, CHUNK), dtype=torch.uint8))
        self.memory = memory.allocate([SHAPE], [torch.bfloat16], MemoryFormat.KV_2LTD)

    def value(self, number: int) -> bytes:
        return random_value(number, CHUNK)

    def put(self, number: int) -> bool:
        ctypes.memmove(self.memory.data_ptr, self.value(number), CHUNK)
        stored: bool = store(self._made, [l2_key(number)], [self.memory]).is_successful()
        return stored

    def get(self, number: int) -> bytes | None:
        if not look(self._made, [l2_key(number)])[0]:
            return None
        ctypes.memset(self.memory.data_ptr, 0, CHUNK)
        (hit,) = load(self._made, [l2_key(number)], [self.memory])
        return ctypes.string_at(self.memory.data_ptr, CHUNK) if hit else None


def l2_key(number: int) -> Any:
    return ObjectKey(number.to_bytes(32, "big"), MODEL, 1)


@contextmanager
def l2(directory: Path, kind: str, **options: Any) -> Iterator[Adapter]:
    directory.mkdir(parents=True)
    with adapter({"type": kind, "base_path": str(directory)} | options) as made:
        driven = Adapter(made)
        yield driven
        driven.memory.ref_count_down()


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("kind", ["fs", "fs_native"])
@pytest.mark.parametrize(
    "options",
    [{}, {"relative_tmp_dir": "tmp"}, {"use_odirect": True}],
    ids=["plain", "tmpdir", "direct"],
)
def test_the_l2_adapters_on_the_mount(tmp_path, scenario, kind, options):
    scenario(tmp_path, partial(l2, kind=kind, **options), CHUNK)
