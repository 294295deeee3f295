"""File systems of their own for tests: ext4 in a file, mounted by loop. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def make_image(image: Path, size: int, *options: str) -> None:
    """An empty ext4, no blocks reserved for root."""
    image.touch()
    os.truncate(image, size)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", *options, image], check=True)


@contextmanager
def mounted(image: Path, point: Path) -> Iterator[Path]:
    """Mount an image; unmounted at the end, also when something is left open there."""
    point.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", image, point], check=True)
    try:
        yield point
    finally:
        if subprocess.run(["umount", point], check=False, capture_output=True).returncode:
            subprocess.run(["umount", "-l", point], check=False)


def copy_as_after_power_loss(image: Path, copy: Path) -> None:
    """What the disk has now: all that was synced, of the rest what happened to be written back."""
    shutil.copyfile(image, copy)
