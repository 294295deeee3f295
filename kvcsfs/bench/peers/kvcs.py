"""kvcsfs itself, with a daemon of its own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack, contextmanager

from kvcs import KvcsLowLevelClient, LLGetItemOpt, LLPutItem
from kvcsfs.bench.daemon import own_daemon
from kvcsfs.bench.environment import ClientSettings, open_client
from kvcsfs.bench.errors import BenchError
from kvcsfs.bench.peers.job import FULL_BATCHES, Job, Turn, Turns
from kvcsfs.bench.policies import charged_bytes
from kvcsfs.config import MIN_CAPACITY


@contextmanager
def kvcsfs(job: Job) -> Turns:
    """Gets with and without verification, puts, queries."""
    capacity = max(MIN_CAPACITY, FULL_BATCHES * job.work.count * charged_bytes(job.work.size))
    with ExitStack() as stack:
        socket = stack.enter_context(own_daemon(job.directory / "store", capacity))

        def client(verify: bool) -> KvcsLowLevelClient:
            settings = ClientSettings(verify_reads=verify)
            return stack.enter_context(open_client(settings, socket, job.workers, job.work.size))

        verified = client(verify=True)
        if job.work.op == "put":
            yield {"kvcsfs": Turn(lambda turn: put(verified, job, turn))}
        elif job.work.op == "get":
            put(verified, job, 0)
            unverified = client(verify=False)
            yield {
                "kvcsfs": Turn(lambda _turn: get(verified, job)),
                "kvcsfs-unverified": Turn(lambda _turn: get(unverified, job)),
            }
        else:
            put(verified, job, 0)
            keys = job.half()
            yield {
                "kvcsfs": Turn(
                    lambda _turn: job.queried(
                        lambda: sum(r.status == "ok" for r in verified.ll_batch_query(keys))
                    )
                )
            }


def put(client: KvcsLowLevelClient, job: Job, turn: int) -> None:
    """Store a batch of fresh keys."""
    items = [LLPutItem(key=key, value=value) for key, value in zip(job.keys(turn), job.buffers, strict=True)]
    _check("put", (r.status for r in client.ll_batch_put(items)), 0)


def get(client: KvcsLowLevelClient, job: Job) -> None:
    """Read the batch that is stored."""
    items = [LLGetItemOpt(key=key) for key in job.keys(0)]
    _check("get", (r.status for r in client.ll_batch_get_into_items(items, job.buffers)), job.work.size)


def _check(op: str, statuses: Iterable[int], expected: int) -> None:
    for status in statuses:
        if status != expected:
            why = os.strerror(-status) if status < 0 else f"status {status}"
            raise BenchError(f"kvcsfs: a {op} failed: {why}")
