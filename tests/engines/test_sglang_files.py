# ruff: noqa: E402, I001  # what is imported when depends on what is there
"""SGLang's own HiCacheFile with its directory on the mount."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engines.file_backends import ON_THE_MOUNT, SCENARIOS, random_value

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from tests.engines import without_torchvision  # noqa: F401  # before anything of SGLang's is imported
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from tests.engines.test_sglang_engine import config

pytestmark = ON_THE_MOUNT

PAGE_BYTES = 256 << 10


class Files:
    """A page at a time, as the cache controller's generic path does."""

    def __init__(self, files: Any) -> None:
        self._files = files

    def value(self, number: int) -> bytes:
        return random_value(number, PAGE_BYTES)

    def put(self, number: int) -> bool:
        page = torch.frombuffer(bytearray(self.value(number)), dtype=torch.bfloat16)
        stored: bool = self._files.batch_set([f"{number:064x}"], [page])
        return stored

    def get(self, number: int) -> bytes | None:
        known: bool = self._files.exists(f"{number:064x}")
        (page,) = self._files.batch_get(
            [f"{number:064x}"], [torch.zeros(PAGE_BYTES // 2, dtype=torch.bfloat16)]
        )
        assert known or page is None
        return None if page is None else page.view(torch.uint8).numpy().tobytes()


@contextmanager
def opened(directory: Path, **options: Any) -> Iterator[Files]:
    yield Files(HiCacheFile(config("page_first", {"file_storage_path": str(directory), **options})))


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("options", [{}, {"max_size": 1 << 40}, {"enable_metadata_cache": True}], ids=str)
def test_hicache_file_on_the_mount(tmp_path, scenario, options):
    scenario(tmp_path, partial(opened, **options), PAGE_BYTES)
