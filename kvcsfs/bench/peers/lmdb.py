"""LMDB in the process: one transaction a batch, no syncs, a writable map."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

from kvcsfs.bench.errors import BenchError
from kvcsfs.bench.peers.job import FULL_BATCHES, Job, Turn, Turns, optional
from kvcsfs.bench.policies import charged_bytes


@contextmanager
def lmdb(job: Job) -> Turns:
    """Values are copied from the map. A put deletes the oldest batch first: LMDB evicts nothing itself."""
    module = optional("lmdb", "'kvcsfs[bench-peers]'")
    room = (FULL_BATCHES + 2) * job.work.count * charged_bytes(job.work.size) + (16 << 20)
    store = module.open(
        str(job.directory), map_size=room, sync=False, metasync=False, writemap=True, lock=False
    )
    try:
        yield {"lmdb": _turn(store, job)}
    finally:
        store.close()


def _turn(store: Any, job: Job) -> Turn:
    if job.work.op == "put":
        return Turn(lambda turn: _put(store, job, turn))
    _put(store, job, 0)
    if job.work.op == "get":
        return Turn(lambda _turn: _get(store, job))
    asked = [key.encode() for key in job.half()]
    return Turn(lambda _turn: job.queried(lambda: _query(store, asked)))


def _put(store: Any, job: Job, turn: int) -> None:
    with store.begin(write=True) as transaction:
        for key in job.keys(turn - FULL_BATCHES):
            transaction.delete(key.encode())
        for key, value in zip(job.keys(turn), job.buffers, strict=True):
            transaction.put(key.encode(), value)


def _get(store: Any, job: Job) -> None:
    with store.begin(buffers=True) as transaction:
        for key, out in zip(job.keys(0), job.buffers, strict=True):
            value = transaction.get(key.encode())
            if value is None:
                raise BenchError("lmdb: a value that was stored is gone")
            out[:] = value


def _query(store: Any, keys: Sequence[bytes]) -> int:
    with store.begin(buffers=True) as transaction:
        return sum(transaction.get(key) is not None for key in keys)
