"""What one soak worker did, and so what may be found. Independent of the store: an append-only file, and arithmetic.

A worker alone writes the keys below its own prefix. Lines: `B key version` before a put (version 0: a delete), `E key
version` once it was acknowledged. Each line is one write(2), so that it outlives the process that wrote it.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

SIZES = (100, 4000, 60_000, 256 << 10)


def value_of(key: str, version: int) -> bytes:
    """The value of a version: its number, and bytes that follow from key and number alone."""
    dice = random.Random(f"{key}:{version}")
    return version.to_bytes(8, "little") + dice.randbytes(dice.choice(SIZES) + version % 17)


class Record:
    """The record of a worker, read from its file and continued there."""

    def __init__(self, path: Path) -> None:
        self.acknowledged: dict[str, int] = {}
        self.begun: dict[str, set[int]] = {}
        self.last = 0
        if path.exists():
            for line in path.read_text().splitlines():
                kind, key, version = line.split(" ")
                self._take(kind, key, int(version))
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def _take(self, kind: str, key: str, version: int) -> None:
        self.last = max(self.last, version)
        if kind == "B":
            self.begun.setdefault(key, set()).add(version)
        else:
            self.acknowledged[key] = version
            self.begun.pop(key, None)

    def _write(self, kind: str, key: str, version: int) -> None:
        os.write(self._fd, f"{kind} {key} {version}\n".encode())
        self._take(kind, key, version)

    def begin(self, key: str, delete: bool = False) -> int:
        """A change is about to be asked for; its version."""
        version = 0 if delete else self.last + 1
        self._write("B", key, version)
        return version

    def end(self, key: str, version: int) -> None:
        """It was acknowledged."""
        self._write("E", key, version)

    @property
    def keys(self) -> list[str]:
        """Every key that may hold a value."""
        return sorted({*self.acknowledged, *self.begun})

    def complaint(self, key: str, value: bytes | bytearray | None) -> str:
        """What is wrong with a value that was found for a key of this worker; "" if nothing. A miss is never wrong."""
        if value is None:
            return ""
        wrong = is_torn(key, value)
        version = int.from_bytes(value[:8], "little")
        allowed = {self.acknowledged.get(key, 0), *self.begun.get(key, ())}
        if not wrong and version not in allowed:
            wrong = f"{key}: version {version} was found, only {sorted(allowed)} may be"
        return wrong


def is_torn(key: str, value: bytes | bytearray) -> str:
    """What is wrong with the bytes of a value of whatever version; "" if nothing."""
    version = int.from_bytes(value[:8], "little")
    if version <= 0 or version > 1 << 40 or bytes(value) != value_of(key, version):
        return f"{key}: {len(value)} bytes that begin with version {version} are not its value"
    return ""
