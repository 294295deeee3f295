"""Plain files, one a key, as SGLang's file backend: temporary file and rename; open and readinto; stat."""

from __future__ import annotations

import os
from contextlib import contextmanager

from kvcsfs.bench.errors import BenchError
from kvcsfs.bench.peers.job import FULL_BATCHES, Job, Turn, Turns


@contextmanager
def files(job: Job) -> Turns:
    """Gets and puts in threads. A put removes the oldest batch; that of `files-unbounded` does not."""
    stored = [_path(job, key) for key in job.keys(0)]

    if job.work.op == "put":
        yield {"files": _full(job, "a"), "files-unbounded": _unbounded(job, "b")}
        return
    job.in_threads(lambda i: _write(stored[i], job.buffers[i]))
    if job.work.op == "get":
        yield {"files": Turn(lambda _turn: job.in_threads(lambda i: _read(stored[i], job.buffers[i])))}
    else:
        asked = [_path(job, key) for key in job.half()]
        yield {"files": Turn(lambda _turn: job.queried(lambda: sum(map(os.path.exists, asked))))}


def _path(job: Job, key: str) -> str:
    return f"{job.directory}/{key.replace('/', '-')}.bin"


def _full(job: Job, store: str) -> Turn:
    """Puts into a full cache: each removes a file of the oldest batch, then writes its own."""

    def run(turn: int) -> None:
        new, old = _paths(job, store, turn), _paths(job, store, turn - FULL_BATCHES)

        def step(i: int) -> None:
            if old:
                os.unlink(old[i])
            _write(new[i], job.buffers[i])

        job.in_threads(step)

    return Turn(run)


def _unbounded(job: Job, store: str) -> Turn:
    """Puts as SGLang makes them unless told otherwise, evicting nothing; the disk is tidied between turns."""

    def run(turn: int) -> None:
        new = _paths(job, store, turn)
        job.in_threads(lambda i: _write(new[i], job.buffers[i]))

    def tidy(turn: int) -> None:
        for path in _paths(job, store, turn - FULL_BATCHES):
            os.unlink(path)

    return Turn(run, tidy)


def _paths(job: Job, store: str, turn: int) -> list[str]:
    return [_path(job, f"{store}/{key}") for key in job.keys(turn)]


def _write(path: str, value: memoryview) -> None:
    temporary = f"{path}.tmp"
    with open(temporary, "wb", buffering=0) as file:
        if file.write(value) != len(value):
            raise BenchError("files: a write was cut short; is the file system full?")
    os.rename(temporary, path)


def _read(path: str, out: memoryview) -> None:
    with open(path, "rb", buffering=0) as file:
        if file.readinto(out) != len(out):
            raise BenchError("files: a read was cut short")
