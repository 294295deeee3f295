"""safetensors files on the mount, as vLLM's example connector keeps them: a directory for each prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engines.file_backends import (
    ON_THE_MOUNT,
    evicted_all_the_time,
    killed_and_started_again,
    mounted,
    random_value,
    to_the_bit,
)

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")
files = pytest.importorskip("safetensors.torch")

pytestmark = ON_THE_MOUNT

TENSOR_BYTES = 512 << 10

Load = Callable[[Path], Any]


def read(path: Path) -> Any:
    """All of the file at once."""
    return files.load(path.read_bytes())["kv_cache"]


def load_file(path: Path) -> Any:
    """Through a map, as vLLM does."""
    return files.load_file(path)["kv_cache"]


def load_slices(path: Path) -> Any:
    """Through a map, a part at a time."""
    with safetensors.safe_open(path, "pt") as opened:
        rows = opened.get_slice("kv_cache")
        return torch.cat([rows[:3], rows[3:]])


class Files:
    def __init__(self, directory: Path, load: Load) -> None:
        self._directory, self._load = directory, load

    def value(self, number: int) -> bytes:
        return random_value(number, TENSOR_BYTES)

    def put(self, number: int) -> bool:
        tensor = torch.frombuffer(bytearray(self.value(number)), dtype=torch.bfloat16).reshape(8, -1)
        path = self._path(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            files.save_file({"kv_cache": tensor}, path)
        except safetensors.SafetensorError:
            return False
        return True

    def get(self, number: int) -> bytes | None:
        try:
            tensor = self._load(self._path(number))
        except FileNotFoundError:
            return None
        return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:032x}" / "layer.0.safetensors"


@contextmanager
def opened(directory: Path, load: Load) -> Iterator[Files]:
    yield Files(directory, load)


@pytest.mark.parametrize("scenario", [to_the_bit, evicted_all_the_time])
@pytest.mark.parametrize("load", [read, load_file, load_slices])
def test_safetensors_on_the_mount(tmp_path, scenario, load):
    scenario(tmp_path, partial(opened, load=load), TENSOR_BYTES)


def test_safetensors_when_the_daemon_dies(tmp_path):
    """Without a map: touching one whose file system is gone is SIGBUS, which ends the program. Source: mmap(2)."""
    killed_and_started_again(tmp_path, partial(opened, load=read), TENSOR_BYTES)


def test_a_mapped_tensor_keeps_its_bytes_when_the_file_is_evicted(tmp_path):
    with mounted(tmp_path, 8, TENSOR_BYTES) as (_, directory):
        stored = Files(directory, load_file)
        assert stored.put(0)
        with safetensors.safe_open(stored._path(0), "pt") as lazily:
            for number in range(1, 20):
                assert stored.put(number)
            assert stored.get(1) is None
            late = lazily.get_tensor("kv_cache").view(torch.uint8).numpy().tobytes()
            assert late == stored.value(0)
