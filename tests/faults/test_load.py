"""Many processes with many threads at once, and ten times the data that the store can hold."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import trio

from kvcsfs.batch.face import BatchFace
from tests.stores import bytes_on_disk, config, running, settle

pytestmark = pytest.mark.fault

ROOT = str(Path(__file__).parents[2])
PROCESSES, THREADS, ROUNDS, KEYS, SIZE = 16, 8, 6, 200, 200_000
CAPACITY = KEYS * SIZE // 10

WORKER = """
import errno, os, random, sys, threading
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.rawclient import RawClient
from tests.stores import checksum

dice = random.Random({seed})
counts = dict(put=0, hit=0)

def work(seed):
    dice = random.Random(seed)
    with RawClient(Path({socket!r})) as client:
        for turn in range({rounds}):
            names = ["k%03d" % dice.randrange({keys}) for _ in range(4)]
            contents = [(name + "." + str(seed) + "." + str(turn) + "|").encode() for name in names]
            contents = [c * (dice.choice([{size}, {size} // 3, 5000]) // len(c)) for c in contents]
            (reply,), (fds,) = client.reserve(names, [len(c) for c in contents])
            fds = iter(fds)
            tokens, values = [], []
            for token, value in zip(reply.tokens, contents):
                if token > 0:
                    fd = next(fds)
                    os.pwrite(fd, value, 0)
                    os.close(fd)
                    tokens.append(token)
                    values.append(value)
                else:
                    assert token == -errno.ENOSPC, token
            assert client.commit(tokens, values) == [0] * len(tokens)
            counts["put"] += len(tokens)
            wanted = names[:2] + ["k%03d" % dice.randrange({keys}) for _ in range(6)]
            (reply,), (fds,) = client.open(wanted)
            fds, sums = iter(fds), iter([reply.checksums[i:i + 16] for i in range(0, len(reply.checksums), 16)])
            for name, size in zip(wanted, reply.sizes):
                assert size >= 0, size
                if size:
                    fd = next(fds)
                    value = os.pread(fd, size, 0)
                    os.close(fd)
                    assert len(value) == size and checksum(value) == next(sums)
                    first = value.partition(b"|")[0] + b"|"
                    assert first.startswith(name.encode() + b".") and value == first * (size // len(first))
                    counts["hit"] += 1
            from kvcsfs import wire
            client.send(wire.Release(0, reply.lease))
            if turn % 7 == 0:
                client.ask(wire.Delete(client.next_id(), 0, names[:1]), wire.DeleteReply)

def guarded(seed):
    try:
        work(seed)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)

threads = [threading.Thread(target=guarded, args=({seed} * 100 + i,)) for i in range({threads})]
[t.start() for t in threads]
[t.join() for t in threads]
print(counts["put"], counts["hit"])
"""


async def test_every_value_read_is_whole_and_the_bytes_add_up(tmp_path):
    settings = config(tmp_path, CAPACITY)
    totals: list[tuple[int, int]] = []
    most = 0

    async def worker(seed: int) -> None:
        script = WORKER.format(
            root=ROOT,
            socket=str(settings.socket),
            seed=seed,
            rounds=ROUNDS,
            keys=KEYS,
            size=SIZE,
            threads=THREADS,
        )
        result = await trio.run_process(
            [sys.executable, "-c", script], capture_stdout=True, capture_stderr=True, check=False
        )
        assert result.returncode == 0, result.stderr.decode()
        puts, hits = result.stdout.split()
        totals.append((int(puts), int(hits)))

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, engine.volumes[0].catalog.ledger.used)
            engine.check()
            await trio.sleep(0.02)

    async with running(settings) as engine:
        async with trio.open_nursery() as nursery:
            face = BatchFace(engine, settings.socket)
            nursery.start_soon(face.serve)
            async with trio.open_nursery() as load:
                load.start_soon(watch)
                async with trio.open_nursery() as workers:
                    for seed in range(PROCESSES):
                        workers.start_soon(worker, seed)
                load.cancel_scope.cancel()
            face.stop()
        await settle(engine)
        engine.check()
        ledger = engine.volumes[0].catalog.ledger
        assert CAPACITY // 2 < most <= CAPACITY
        assert ledger.reserved == ledger.retired == 0
        assert ledger.used == bytes_on_disk(tmp_path / "data0")
        names = [e.key for e in await engine.page(0, "", "", KEYS)]
        assert all(await engine.verify_many(0, names)), "what is stored is right"
        assert sum(hits for _, hits in totals) > 100
        assert sum(puts for puts, _ in totals) > PROCESSES * THREADS * ROUNDS
        status = engine.status()
        assert (status["leases"], status["reservations"]) == (0, 0)
    assert len(os.listdir("/proc/self/fd")) < 200
