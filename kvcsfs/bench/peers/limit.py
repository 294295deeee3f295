"""The limit: threads of nothing but preadv and pwritev, on open descriptors of allocated files."""

from __future__ import annotations

import os
from contextlib import contextmanager

from kvcsfs.bench.peers.job import Job, Turn, Turns


@contextmanager
def limit(job: Job) -> Turns:
    """What the machine can do for a get or a put."""
    if job.work.op == "query":
        yield {}  # nothing moves
        return
    descriptors = [
        os.open(job.directory / str(i), os.O_RDWR | os.O_CREAT, 0o600) for i in range(job.work.count)
    ]

    def write(i: int) -> None:
        moved = 0
        while moved < job.work.size:
            moved += os.pwritev(descriptors[i], [job.buffers[i][moved:]], moved)

    def read(i: int) -> None:
        moved = 0
        while moved < job.work.size:
            moved += os.preadv(descriptors[i], [job.buffers[i][moved:]], moved)

    try:
        job.in_threads(write)
        step = read if job.work.op == "get" else write
        yield {"limit": Turn(lambda _turn: job.in_threads(step))}
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
