"""Pools of daemon threads. Not concurrent.futures: the exit waits for its threads, and a disk may hang."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from mmap import mmap
from queue import SimpleQueue

from kvcsfs.sdk.deadline import Deadline

log = logging.getLogger("kvcs")

CHUNK_BYTES = 512 << 10  # of hashing beside a transfer: 512 KiB to 1 MiB measured best
BOUNCE_BYTES = 1 << 20

Job = Callable[[], None]


class _Local(threading.local):
    bounce: memoryview | None = None


_local = _Local()


def bounce_buffer() -> memoryview:
    """This thread's own chunk, for reads that may wait for a disk. Page-aligned, as direct I/O wants it."""
    if _local.bounce is None:
        _local.bounce = memoryview(mmap(-1, BOUNCE_BYTES))
    return _local.bounce


class Pool:
    """At most `size` threads, started when there is work for them."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, job: Job) -> None:
        """Have a thread run the job; after `close` it is dropped."""
        if len(self._threads) < self.size:
            self._start()
        self._jobs.put(job)

    def _start(self) -> None:
        with self._lock:
            if self._closed or len(self._threads) >= self.size:
                return
            thread = threading.Thread(target=_work, args=(self._jobs,), name=f"kvcs-{self.name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Let the threads end after what is queued."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)

    def join(self, deadline: Deadline) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(deadline.remaining())


def _work(jobs: SimpleQueue[Job | None]) -> None:
    """A thread holds the queue and not its pool or client, so that an unclosed client can be collected."""
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception:
            log.exception("a worker's job failed")
        del job  # what it refers to is the caller's memory
