"""Redis over its Unix socket, with a server of its own: pipelined, no persistence, its own eviction."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from typing import Any

from kvcsfs.bench.daemon import running, says
from kvcsfs.bench.errors import BenchError
from kvcsfs.bench.peers.job import FULL_BATCHES, Job, MissingPeerError, Turn, Turns, optional

# What the server needs beside the values, so that the limit on its memory is one on values.
OVERHEAD_BYTES = 64 << 20


@contextmanager
def redis(job: Job) -> Turns:
    """MGET and a copy into the buffers; SET in a pipeline; EXISTS in a pipeline."""
    client_module = optional("redis", "'kvcsfs[bench-peers]'")
    server = shutil.which("redis-server")
    if server is None:
        raise MissingPeerError("redis-server is not on PATH: apt install redis-server")
    memory = FULL_BATCHES * job.work.batch_bytes + OVERHEAD_BYTES
    with tempfile.TemporaryDirectory(prefix="kvcs-bench-") as directory:  # short, as a socket's path must be
        socket = f"{directory}/socket"
        command = [server, "--port", "0", "--unixsocket", socket, "--save", "", "--appendonly", "no"]
        command += ["--dir", directory, "--maxmemory", str(memory), "--maxmemory-policy", "allkeys-lru"]
        with running(command, says("eady to accept connections")):
            client = client_module.Redis(unix_socket_path=socket)
            try:
                yield {"redis": _turn(client, job)}
            finally:
                client.close()


def _turn(client: Any, job: Job) -> Turn:
    def put(turn: int) -> None:
        pipeline = client.pipeline(transaction=False)
        for key, value in zip(job.keys(turn), job.buffers, strict=True):
            pipeline.set(key, value)
        pipeline.execute()  # raises for any that failed

    def get(_turn: int) -> None:
        for value, out in zip(client.mget(job.keys(0)), job.buffers, strict=True):
            if value is None:
                raise BenchError("redis: a value that was stored is gone")
            out[:] = value

    def query() -> int:
        pipeline = client.pipeline(transaction=False)
        for key in asked:
            pipeline.exists(key)
        return sum(pipeline.execute())

    asked = job.half()
    if job.work.op == "put":
        return Turn(put)
    put(0)
    return Turn(get) if job.work.op == "get" else Turn(lambda _turn: job.queried(query))
