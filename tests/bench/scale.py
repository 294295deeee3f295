"""What a batch costs with few and with many entries in the index, and what an entry takes of memory.

    python tests/bench/scale.py --entries 10000,10000000 --data DIR

Each store runs in a process of its own, filled with entries that have no files; the batches move real values. All
stores are up at once and are measured in turns. 10 million entries take 5 GB of memory and a minute to make.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import trio

from kvcs import KvcsLowLevelClient, LLGetItemOpt, LLPutItem
from kvcsfs.batch.face import BatchFace
from kvcsfs.config import Config, MountpointConfig
from kvcsfs.engine.engine import Engine
from kvcsfs.engine.entry import Entry, charge

SIZE, COUNT, QUERIED = 4 << 20, 32, 256
TURNS = 9


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def key_of(i: int) -> str:
    return f"model/v1/{i % 1000:03}/{i:032x}"


def serve(data: str, socket: str, entries: int) -> None:
    """Run a daemon whose index already has so many entries, the way recovery would have left it."""
    capacity = entries * charge(SIZE) + 16 * COUNT * charge(SIZE)
    config = Config((MountpointConfig(Path(data), capacity, 0.0, 0.0),), Path(socket))

    async def main() -> None:
        engine = Engine(config)
        async with engine.running():
            await engine.volumes.recovered()
            keys = [key_of(i) for i in range(entries)]
            gc.disable()
            before = resident_bytes()
            made = [
                Entry(key, (1 << 50) + i, SIZE, i.to_bytes(16, "big"), (1 << 51) + i, 1.7e9 + i)
                for i, key in enumerate(keys)
            ]
            engine.volumes[0].catalog.load(made)
            del made
            each = (resident_bytes() - before) / entries
            gc.enable()
            gc.collect()
            gc.freeze()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(BatchFace(engine, Path(socket)).serve)
                print(f"{each:.0f}", flush=True)
                await trio.sleep_forever()

    trio.run(main)


def measure(client: KvcsLowLevelClient, entries: int, buffers: list[bytearray]) -> dict[str, float]:
    keys = [f"real/{i}" for i in range(COUNT)]
    step = max(1, entries // QUERIED)
    asked = [key_of(i * step) if i % 2 else f"none/{i}" for i in range(QUERIED)]
    times: dict[str, float] = {}
    begin = time.perf_counter()
    assert not any(
        r.status for r in client.ll_batch_put([LLPutItem(k, b) for k, b in zip(keys, buffers, strict=True)])
    )
    times["put"] = time.perf_counter() - begin
    begin = time.perf_counter()
    results = client.ll_batch_get_into_items([LLGetItemOpt(key) for key in keys], buffers)
    times["get"] = time.perf_counter() - begin
    assert all(r.status == SIZE for r in results)
    begin = time.perf_counter()
    for _ in range(20):
        found = client.ll_batch_query(asked)
    times["query"] = (time.perf_counter() - begin) / 20
    assert sum(r.exists for r in found) == QUERIED // 2
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--entries", default="10000,1000000")
    parser.add_argument("--data", default=tempfile.gettempdir())
    arguments = parser.parse_args()
    counts = [int(n) for n in arguments.entries.split(",")]
    buffers = [bytearray(os.urandom(SIZE)) for _ in range(COUNT)]
    with tempfile.TemporaryDirectory(dir=arguments.data) as folder:
        servers, clients = [], []
        for n in counts:
            data = Path(folder, str(n))
            data.mkdir()
            command = [sys.executable, __file__, "serve", str(data), f"{folder}/{n}.sock", str(n)]
            server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert server.stdout is not None
            print(f"{n:>10,} entries: {server.stdout.readline().strip()} B an entry beyond its key")
            servers.append(server)
            clients.append(KvcsLowLevelClient(f"{folder}/{n}.sock"))
        for client, n in zip(clients, counts, strict=True):
            measure(client, n, buffers)  # warm: slots made, descriptors open
        turns = [
            [measure(client, n, buffers) for client, n in zip(clients, counts, strict=True)]
            for _ in range(TURNS)
        ]
        for op in ("get", "put", "query"):
            for i, n in enumerate(counts):
                median = statistics.median(turn[i][op] for turn in turns)
                ratio = statistics.median(turn[i][op] / turn[0][op] for turn in turns)
                print(f"{op:6} {n:>10,} entries  {median * 1e3:8.2f} ms  {ratio:5.2f} of the first")
        for client, server in zip(clients, servers, strict=True):
            client.close()
            server.terminate()
            server.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
