"""What a test needs of the machine. In CI, which is root, tests/conftest.py lets nothing begin without /dev/fuse."""

from __future__ import annotations

import os

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, or becomes other users")
needs_fuse = pytest.mark.skipif(
    not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="/dev/fuse can't be opened"
)
