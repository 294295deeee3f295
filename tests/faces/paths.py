"""The key that a path of the mount stands for, and the errno that a call on it fails with."""

from pathlib import Path

import pytest

from tests.faces.mounted import Mounted


def key(path: Path, store: Mounted) -> str:
    return str(path.relative_to(store.path))


def fails(code: int):
    return pytest.raises(OSError, check=lambda exc: exc.errno == code)
