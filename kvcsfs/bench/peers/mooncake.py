"""Mooncake Store over loopback: a master of its own, and a segment of memory in this process."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

from kvcsfs.bench.daemon import listens, running
from kvcsfs.bench.errors import BenchError
from kvcsfs.bench.peers.job import FULL_BATCHES, Job, MissingPeerError, Turn, Turns, optional

PACKAGE = "mooncake-transfer-engine-non-cuda"
MIB = 1 << 20


@contextmanager
def mooncake(job: Job) -> Turns:
    """Batch calls from and into registered buffers. A put removes the oldest batch first."""
    os.environ.setdefault("GLOG_minloglevel", "3")  # its client logs to our stderr
    module = optional("mooncake.store", PACKAGE)
    own = os.path.dirname(sys.executable)
    master = shutil.which("mooncake_master", path=f"{own}:{os.environ.get('PATH', '')}")
    if master is None:
        raise MissingPeerError(f"mooncake_master is not on PATH: pip install {PACKAGE}")
    port, metrics, client = _free_ports(3)
    command = [master, f"-rpc_port={port}", f"-metrics_port={metrics}"]
    with running(command, listens(port)):
        store = module.MooncakeDistributedStore()
        room = (FULL_BATCHES + 1) * job.work.batch_bytes + 64 * MIB
        local = (f"127.0.0.1:{client}", "P2PHANDSHAKE", room, 64 * MIB, "tcp", "", f"127.0.0.1:{port}")
        if store.setup(*local) != 0:
            raise BenchError("mooncake: the client could not be set up")
        try:
            yield {"mooncake": _turn(store, job)}
        finally:
            store.close()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _turn(store: Any, job: Job) -> Turn:
    pointers = [ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in job.buffers]
    sizes = [job.work.size] * job.work.count
    for pointer in pointers:
        store.register_buffer(pointer, job.work.size)

    def put(turn: int) -> None:
        if oldest := job.keys(turn - FULL_BATCHES):
            _check("removal", store.batch_remove(oldest, True), 0)
        _check("put", store.batch_put_from(job.keys(turn), pointers, sizes), 0)

    if job.work.op == "put":
        return Turn(put)
    put(0)
    keys = job.keys(0)
    if job.work.op == "get":
        return Turn(lambda _turn: _check("get", store.batch_get_into(keys, pointers, sizes), job.work.size))
    asked = job.half()
    return Turn(lambda _turn: job.queried(lambda: sum(answer == 1 for answer in store.batch_is_exist(asked))))


def _check(op: str, statuses: Sequence[int], expected: int) -> None:
    for status in statuses:
        if status != expected:
            raise BenchError(f"mooncake: a {op} failed with status {status}")
