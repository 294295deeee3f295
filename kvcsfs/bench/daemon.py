"""Starting a daemon, or a peer's server, for the time of one benchmark."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvcsfs.bench.errors import BenchError

START_S = 60.0
STOP_S = 30.0


@contextlib.contextmanager
def own_daemon(data: Path, capacity: int) -> Iterator[str]:
    """A daemon of our own on the new directory `data`; gives its socket's path.

    Raises:
        BenchError: it did not start; with the last line that it said.
    """
    data.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="kvcs-bench-") as directory:  # short, as a socket's path must be
        socket = str(Path(directory) / "socket")
        command = [sys.executable, "-m", "kvcsfs.cli", "serve", "--data", str(data)]
        with running([*command, "--capacity", str(capacity), "--socket", socket], ready="kvcsfs ready"):
            yield socket


@contextlib.contextmanager
def running(command: Sequence[str], ready: str) -> Iterator[None]:
    """A process for the time of the block, entered once a line of its stdout contains `ready`.

    It has a session of its own, so that a Ctrl-C doesn't end it before the benchmark has cleaned up.
    """
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        try:
            if not _answers(process, ready):
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip().splitlines()
                raise BenchError(
                    f"{' '.join(command)} did not start: {said[-1] if said else 'it said nothing'}"
                )
            yield
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout
            process.stdout.close()


def _answers(process: subprocess.Popen[str], ready: str) -> bool:
    """Wait for the line; a thread then reads on, since a full pipe would stop the process."""
    found = threading.Event()
    ended = threading.Event()

    def read() -> None:
        assert process.stdout
        with contextlib.suppress(ValueError):  # closed when the process is stopped
            for line in process.stdout:
                if ready in line:
                    found.set()
                    ended.set()
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    ended.wait(START_S)
    return found.is_set()
