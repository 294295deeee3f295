"""What tests of the mount share: a store for a whole module, and a directory of its own for each test."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faces.mounted import Mounted


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Iterator[Mounted]:
    base = tmp_path_factory.mktemp("posix")
    with Mounted(base / "data", base / "mnt") as mounted:
        yield mounted
        mounted.call("check")
        assert mounted.stop() == ""
    assert os.listdir(base / "mnt") == []


@pytest.fixture
def folder(store, request) -> Iterator[Path]:
    path = store.path / request.node.name
    path.mkdir()
    yield path
    store.call("check")
    shutil.rmtree(path)
