"""Plain files, one a key, as SGLang's file backend: temporary file and rename; open and readinto; stat."""

from __future__ import annotations

import os
from contextlib import contextmanager

from kvcsfs.bench.errors import BenchError
from kvcsfs.bench.peers.job import Job, Turn, Turns


@contextmanager
def files(job: Job) -> Turns:
    """Gets and puts in threads; the oldest batch is removed between turns, since files evict nothing."""
    stored = [_path(job, key) for key in job.keys(0)]

    def write(turn: int) -> None:
        paths = [_path(job, key) for key in job.keys(turn)]
        job.in_threads(lambda i: _write(paths[i], job.buffers[i]))

    def remove_oldest(turn: int) -> None:
        if turn >= 2:
            for key in job.keys(turn - 2):
                os.unlink(_path(job, key))

    if job.work.op == "put":
        yield {"files": Turn(write, remove_oldest)}
        return
    write(0)
    if job.work.op == "get":
        yield {"files": Turn(lambda _turn: job.in_threads(lambda i: _read(stored[i], job.buffers[i])))}
    else:
        asked = [_path(job, key) for key in job.half()]
        yield {"files": Turn(lambda _turn: job.queried(lambda: sum(map(os.path.exists, asked))))}


def _path(job: Job, key: str) -> str:
    return f"{job.directory}/{key.replace('/', '-')}.bin"


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
