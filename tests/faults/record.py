"""What a workload says it did, and what must therefore be in the store after a crash.

Lines of JSON, each written by one write(2), so that they survive the process. `begin` names the keys that an operation
may change and the version each may get (None: no value), `gone` keys that left the index meanwhile, `end` how the keys
stand once it was acknowledged. `ordering` is the order of use when a checkpoint begins, `order` when it is done.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

SIZES = (3000, 9000, 20_000)


def value_of(version: int) -> bytes:
    """The value of a version: no two are the same."""
    return (f"{version:06};".encode() * 3000)[: SIZES[version % len(SIZES)] + version % 7]


def version_of(value: bytes) -> int:
    """The version whose value this is, byte for byte."""
    version = int(value[:6])
    assert value == value_of(version)
    return version


class Log:
    """Appends lines."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, **line: object) -> None:
        os.write(self._fd, json.dumps(line).encode() + b"\n")


class Record:
    """What a log says: versions allowed by key (None: absent), and the the orders of use that may be found."""

    def __init__(self, path: Path) -> None:
        self.allowed: dict[str, set[int | None]] = {}
        self.orders: list[list[str]] = [[]]
        self.version = 0
        self.ended = True
        for line in path.read_text().splitlines() if path.exists() else ():
            self._take(json.loads(line))

    def _take(self, line: dict[str, object]) -> None:
        match line:
            case {"begin": dict(changes)}:
                self.ended = False
                for key, version in changes.items():
                    self.allowed.setdefault(key, {None}).add(version)
                    self.version = max(self.version, version or 0)
                    self._moved(key)
            case {"gone": list(keys)}:
                for key in keys:
                    self.allowed[key].add(None)
                    self._moved(key)
            case {"end": dict(state)}:
                self.ended = True
                self.allowed.update({key: {version} for key, version in state.items()})
            case {"ordering": list(keys)}:
                self.orders.append(list(keys))
            case {"order": list(keys)}:
                del self.orders[:-1]
            case _:
                raise AssertionError(line)

    def _moved(self, key: str) -> None:
        """What has changed since the checkpoint says nothing of the order."""
        self.orders = [[k for k in order if k != key] for order in self.orders]
