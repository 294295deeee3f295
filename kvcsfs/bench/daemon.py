"""Starting a daemon, or a peer's server, for the time of one benchmark."""

from __future__ import annotations

import contextlib
import errno
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvcs import KvcsLowLevelClient, LLPutItem
from kvcsfs.bench.errors import BenchError

START_S = 60.0
STOP_S = 30.0
PROBE = "kvcs-bench/probe"


@contextlib.contextmanager
def own_daemon(data: Path, capacity: int) -> Iterator[str]:
    """A daemon of our own on the new directory `data`; gives its socket's path.

    Raises:
        BenchError: it did not start; with the last line that it said.
    """
    data.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="kvcs-bench-") as directory:  # short, as a socket's path must be
        path = str(Path(directory) / "socket")
        command = [sys.executable, "-m", "kvcsfs.cli", "serve", "--data", str(data)]
        with running([*command, "--capacity", str(capacity), "--socket", path], says("kvcsfs ready")):
            _settle(path)
            yield path


def _settle(path: str) -> None:
    """Wait until a new daemon takes puts: while it recovers, though there is nothing yet, it refuses them."""
    end = time.monotonic() + START_S
    with KvcsLowLevelClient(path) as client:
        while client.ll_batch_put([LLPutItem(key=PROBE, value=b"?")])[0].status == -errno.EBUSY:
            if time.monotonic() > end:
                raise BenchError(f"the daemon still recovers after {START_S:.0f} s")
            time.sleep(0.01)
        client.ll_batch_delete([PROBE])


@contextlib.contextmanager
def running(command: Sequence[str], answers: Callable[[subprocess.Popen[str]], bool]) -> Iterator[None]:
    """A process for the time of the block, entered once it `answers` (see `says` and `listens`).

    It has a session of its own, so that a Ctrl-C doesn't end it before the benchmark has cleaned up.
    """
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        try:
            if not answers(process):
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip().splitlines()
                raise BenchError(f"{command[0]} did not start: {said[-1] if said else 'it said nothing'}")
            yield
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def says(ready: str) -> Callable[[subprocess.Popen[str]], bool]:
    """Wait until a line of its stdout contains `ready`."""

    def answers(process: subprocess.Popen[str]) -> bool:
        ended = threading.Event()
        found = []

        def read() -> None:
            assert process.stdout
            with process.stdout:
                for line in process.stdout:  # to its end, since a full pipe would stop the process
                    if ready in line:
                        found.append(line)
                        ended.set()
            ended.set()

        threading.Thread(target=read, daemon=True).start()
        ended.wait(START_S)
        return bool(found)

    return answers


def listens(port: int) -> Callable[[subprocess.Popen[str]], bool]:
    """Wait until it accepts connections on a local port; for a server that says nothing."""

    def answers(process: subprocess.Popen[str]) -> bool:
        end = time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return True
            time.sleep(0.05)
        return False

    return answers
