"""LMCache's file backends, as its server uses them: the L2 adapters `fs` (Python) and `fs_native` (C++)."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

from kvcsfs.bench.errors import BenchError
from kvcsfs.bench.peers.job import FULL_BATCHES, Job, Turn, Turns, optional

TIMEOUT_MS = 60_000


class Value:
    """A buffer with what these adapters ask of LMCache's MemoryObj."""

    def __init__(self, buffer: memoryview) -> None:
        self.byte_array = buffer
        self.metadata = None

    def get_size(self) -> int:
        """Its bytes."""
        return len(self.byte_array)

    get_physical_size = get_size


@contextmanager
def lmcache(job: Job) -> Turns:
    """A batch is one task, ended by its event. A put deletes the oldest batch first."""
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    adapters = optional("lmcache.v1.distributed.l2_adapters", "lmcache")
    configs = optional("lmcache.v1.distributed.l2_adapters.config", "lmcache")
    opened = []
    try:
        turns = {}
        for name, options in (("fs", {}), ("fs_native", {"num_workers": job.workers})):
            directory = job.directory / name
            directory.mkdir()
            config = configs.get_l2_adapter_config_class(name)
            opened.append(
                adapters.create_l2_adapter(config.from_dict({"base_path": str(directory)} | options))
            )
            turns[f"lmcache-{name.replace('_', '-')}"] = _turn(opened[-1], job)
        yield turns
    finally:
        for adapter in opened:
            adapter.close()


def _turn(adapter: Any, job: Job) -> Turn:
    object_key = optional("lmcache.v1.distributed.api", "lmcache").ObjectKey
    values = [Value(buffer) for buffer in job.buffers]

    def keys(names: Sequence[str]) -> list[Any]:
        return [object_key(name.encode(), "model-a", 0) for name in names]

    def put(turn: int) -> None:
        adapter.delete(keys(job.keys(turn - FULL_BATCHES)))
        task = adapter.submit_store_task(keys(job.keys(turn)), values)
        done = _wait(adapter.get_store_event_fd(), lambda: adapter.pop_completed_store_tasks().get(task))
        if not done.is_successful():
            raise BenchError("lmcache: a put failed")

    def get(_turn: int) -> None:
        task = adapter.submit_load_task(keys(job.keys(0)), values)
        done = _wait(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
        if len(done.get_indices_list()) != job.work.count:
            raise BenchError("lmcache: a get failed")

    def query() -> int:
        task = adapter.submit_lookup_and_lock_task(asked, {})
        done = _wait(
            adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task)
        )
        adapter.submit_unlock(asked)
        return len(done.get_indices_list())

    asked = keys(job.half())
    if job.work.op == "put":
        return Turn(put)
    put(0)
    return Turn(get) if job.work.op == "get" else Turn(lambda _turn: job.queried(query))


def _wait(event: int, result: Callable[[], Any]) -> Any:
    """Wait for a task's event, then take its result."""
    poll = select.poll()
    poll.register(event, select.POLLIN)
    while (done := result()) is None:
        if not poll.poll(TIMEOUT_MS):
            raise BenchError(f"lmcache: a task did not end within {TIMEOUT_MS / 1000:.0f} s")
        os.eventfd_read(event)
    return done
