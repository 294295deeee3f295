"""The settings that every connector takes, out of the engine's own configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self


@dataclass(frozen=True)
class Settings:
    """How a connector reaches the store. Sizes in bytes, times in seconds; 0 workers stands for the SDK's default.

    `socket` "": $KVCS_SOCKET, else the SDK's default. `version`: raise it when weights change under one model name.
    `deadline_s`: of a batch of questions or reads; `store_deadline_s`: of a batch to store.
    `pause_s`: how long a store that let a read's deadline pass is left alone, and everything a miss.
    `queue_bytes`, `queue_items`: what may wait to be written; more is dropped and counted.
    """

    socket: str = ""
    version: str = "v1"
    mountpoint_index: int = 0
    deadline_s: float = 5.0
    store_deadline_s: float = 30.0
    pause_s: float = 1.0
    get_workers: int = 0
    set_workers: int = 0
    load_threads: int = 2
    queue_bytes: int = 1 << 30
    queue_items: int = 4096
    verify_reads: bool = True

    @classmethod
    def take(cls, options: Mapping[str, Any], prefix: str = "") -> Self:
        """Read the options whose names start with `prefix`.

        Raises:
            ValueError: an option that is unknown or of a wrong kind; one line that says what would be right.
        """
        known = {field.name: type(field.default) for field in fields(cls)}
        values = {}
        for name, value in options.items():
            if not name.startswith(prefix):
                continue
            kind = known.get(name.removeprefix(prefix))
            if kind is None:
                raise ValueError(
                    f"unknown option {name!r}, expected one of {', '.join(prefix + n for n in known)}"
                )
            values[name.removeprefix(prefix)] = _checked(name, value, kind)
        return cls(**values)


def _checked(name: str, value: Any, kind: type) -> Any:
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (isinstance(value, int | float) and value < 0):
        expected = {
            int: "a whole number, 0 or more",
            float: "a number, 0 or more",
            bool: "true or false",
            str: "a text",
        }
        raise ValueError(f"{name} must be {expected[kind]}, not {value!r}")
    return value
