"""A real daemon for tests of connectors: started on a directory, killed, started again."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from kvcs import KvcsLowLevelClient, LLPutItem
from kvcsfs import wire
from kvcsfs.control import Control

PATIENCE_S = 30.0


class Daemon:
    """One daemon below `home`, serving until the `with` block ends. Its socket has a short path of its own."""

    def __init__(self, home: Path, capacity: int, mount: Path | None = None) -> None:
        self._data, self._log, self._capacity, self._mount = home / "data", home / "log", capacity, mount
        self._directory = tempfile.TemporaryDirectory(prefix="kvcs-")
        self.socket = f"{self._directory.name}/s"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it and wait until it takes puts; what was stored before is known then."""
        self._data.mkdir(parents=True, exist_ok=True)
        command = [
            os.environ.get("KVCSFS_PYTHON", sys.executable),  # an engine's environment has no daemon
            "-m",
            "kvcsfs.cli",
            "serve",
            "--data",
            str(self._data),
            "--socket",
            self.socket,
        ]
        if self._mount:
            command += ["--mount", str(self._mount)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--capacity", str(self._capacity)], stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._process.stdout
        assert self._process.stdout.readline().startswith("kvcsfs ready")
        self._wait_for_recovery()

    def kill(self) -> None:
        """End it as a crash would; the dead mount stays until the next start."""
        assert self._process
        self._process.kill()
        self._process.communicate()
        self._process = None

    def evict(self) -> None:
        """Evict everything that nobody holds."""
        with Control(self.socket) as control:
            control.ask(wire.Evict(2, 0, "", 0), wire.EvictReply)

    def empty(self) -> None:
        """Evict everything, also what is let go a moment later; started again if it was left dead."""
        if self._process is None:
            self.start()
        end = time.monotonic() + PATIENCE_S
        with Control(self.socket) as control:
            while control.ask(wire.Status(2), wire.StatusReply).status["mountpoints"][0]["entries"]:
                assert time.monotonic() < end, "something is held"
                control.ask(wire.Evict(2, 0, "", 0), wire.EvictReply)

    def warnings(self) -> list[str]:
        """The lines of its log that tell of trouble."""
        return [line for line in self._log.read_text().splitlines() if not line.startswith("INFO ")]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process:
            self._process.terminate()
            self._process.communicate(timeout=PATIENCE_S)
        self._unmount()
        self._directory.cleanup()

    def _wait_for_recovery(self) -> None:
        end = time.monotonic() + PATIENCE_S
        with KvcsLowLevelClient(self.socket) as client:
            while client.ll_batch_put([LLPutItem("probe", b"?")])[0].status == -errno.EBUSY:
                assert time.monotonic() < end, "the daemon still recovers"
                time.sleep(0.01)
            client.ll_batch_delete(["probe"])

    def _unmount(self) -> None:
        if self._mount and f" {self._mount} fuse" in Path("/proc/self/mounts").read_text():
            subprocess.run(["umount", "-l", str(self._mount)], check=True)
