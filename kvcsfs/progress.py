"""A bar on stderr that shows how far a run is, when somebody is looking."""

from __future__ import annotations

import shutil
import sys
from types import TracebackType
from typing import Self, TextIO

WIDTH = 24


class Progress:
    """`with Progress(total) as bar: bar.step("what comes next")`; silent where `out` is no terminal."""

    def __init__(self, total: int, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._total, self._done = max(total, 1), 0
        self._shown = self._out.isatty()

    def step(self, what: str, done: int = 1) -> None:
        """Show `what` as the part under way; `done` parts further than at the last call after it ends."""
        self.reach(self._done, what)
        self._done += done

    def reach(self, done: int, what: str) -> None:
        """Show that `done` parts are behind us."""
        done = min(done, self._total)
        line = f"[{'#' * (WIDTH * done // self._total):{WIDTH}}] {done}/{self._total} {what}"
        self._write(line[: shutil.get_terminal_size().columns - 1])

    def _write(self, line: str) -> None:
        if self._shown:
            self._out.write(f"\r\x1b[K{line}")
            self._out.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write("")
