"""A real daemon under frames of garbage, and one SDK client over many batches: nothing leaks, nothing breaks."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcs import KvcsLowLevelClient, LLGetItemOpt, LLPutItem
from kvcsfs import wire
from kvcsfs.errors import ProtocolError
from tests.daemons import Daemon, store_file
from tests.rawclient import RawClient

pytestmark = pytest.mark.long

FRAMES = int(os.environ.get("KVCSFS_FRAMES", "20000"))
BATCHES = int(os.environ.get("KVCSFS_BATCHES", "500"))
A_CONNECTION = 50  # frames before another connection is made
ROOT = Path(__file__).resolve().parents[2]
VECTORS = json.loads((ROOT / "tests" / "vectors" / "frames.json").read_text())
REQUESTS = [
    bytes.fromhex(v["frame"])[4:]
    for v in VECTORS
    if v["message"] in {m.__struct_config__.tag for m in wire.Request.__args__}
]
ODD: list[Any] = [
    0,
    1,
    -1,
    2**31,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    0.0,
    -1.5,
    float("nan"),
    float("inf"),
    None,
    True,
]
ODD += [
    "",
    "k",
    "a/b",
    "x" * 2000,
    "\0",
    "ä",
    b"",
    b"\xff" * 16,
    [],
    ["k"] * 300,
    [1] * 300,
    [[]],
    {},
    {"a": 1},
]


@pytest.fixture
def daemon(tmp_path):
    with Daemon(store_file(tmp_path, capacity="8MiB")) as running:
        yield running


def mutated(dice: random.Random) -> bytes:
    """A payload that is nearly a request, by its fields or by its bytes."""
    payload = dice.choice(REQUESTS)
    if dice.random() < 0.6:
        fields: list[Any] = msgspec.msgpack.decode(payload)
        for _ in range(dice.randint(0, 3)):
            at = dice.randrange(len(fields) + 1)
            fields[at : at + dice.randint(0, 1)] = [dice.choice(ODD)]
        return msgspec.msgpack.encode(fields)
    data = bytearray(payload)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(data) + 1)
        data[at : at + dice.randint(0, 4)] = dice.randbytes(dice.randint(0, 4))
    return bytes(data)


def framed(payload: bytes, dice: random.Random) -> tuple[bytes, bool]:
    """The frame of a payload, and whether the daemon must close after it."""
    if dice.random() < 0.02:
        size = dice.choice([len(payload) + 1, 2**22 + 1, 2**32 - 1])
        return size.to_bytes(4, "little") + payload, True
    fatal = False
    try:
        fatal = isinstance(wire.decode_request(payload), wire.Hello)
    except wire.UnknownRequest:
        pass
    except ProtocolError:
        fatal = True
    return len(payload).to_bytes(4, "little") + payload, fatal


def one_connection(path: Path, dice: random.Random) -> int:
    """Send garbage until the daemon has enough of it; how many frames it took. Descriptors that come are dropped."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(20)
        client.connect(str(path))
        client.sendall(wire.encode(wire.Hello(1, wire.PROTOCOL_VERSION, "garbage", 64)))
        sent, fatal = 0, False
        while sent < A_CONNECTION and not fatal:
            data, fatal = framed(mutated(dice), dice)
            client.sendall(data)
            sent += 1
        client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while client.recv(1 << 16):  # until it has read all
                pass
    return sent


def size_of(pid: int) -> tuple[int, int]:
    """Open descriptors and resident bytes of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return len(os.listdir(f"/proc/{pid}/fd")), pages * os.sysconf("SC_PAGE_SIZE")


def settle(path: Path) -> None:
    """Wait until nobody but us holds anything."""
    with RawClient(path) as client:
        end = time.monotonic() + 30
        while (
            (s := client.status())["sessions"] > 1 or s["leases"] or s["reservations"] or s["retired_bytes"]
        ):
            assert time.monotonic() < end, s
            time.sleep(0.05)


def test_garbage(daemon, tmp_path):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    path, pid = tmp_path / "sock", daemon.process.pid
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.extend(daemon.process.stderr), daemon=True)
    reader.start()
    sent, before = 0, (0, 0)
    while sent < FRAMES:
        sent += one_connection(path, dice)
        if not before[0] and sent > FRAMES // 10:
            settle(path)
            before = size_of(pid)
        if dice.random() < 0.001:
            with RawClient(path) as good:
                assert good.put("good", b"x" * 5000) == 0
                assert good.get("good") in (b"x" * 5000, None)  # a frame of garbage may delete it
    settle(path)
    fds, memory = size_of(pid)
    assert daemon.process.poll() is None
    assert fds <= before[0] + 300, "kept ready for hot objects, no more"
    assert memory <= before[1] + (64 << 20)
    daemon.process.terminate()
    assert daemon.process.wait(timeout=20) == 0
    reader.join()
    assert not [line for line in log if "Traceback" in line or "failed" in line], "".join(log)[:5000]


def test_an_sdk_client_over_many_batches_leaks_nothing(daemon, tmp_path):
    pid = daemon.process.pid
    with KvcsLowLevelClient(str(tmp_path / "sock")) as client:
        for i in range(BATCHES):
            items = [LLPutItem(f"k/{i % 50}/{j}", os.urandom(2000)) for j in range(4)]
            assert [r.status for r in client.ll_batch_put(items)] == [0] * 4
            got = client.ll_batch_get_items([LLGetItemOpt(item.key) for item in items])
            assert [r.data for r in got] == [item.value for item in items]
            client.ll_batch_query([item.key for item in items])
            if i % 7 == 0:
                client.ll_batch_delete([items[0].key])
            if i == BATCHES // 10:
                before = (*size_of(os.getpid()), threading.active_count(), *size_of(pid))
        after = (*size_of(os.getpid()), threading.active_count(), *size_of(pid))
    assert after[0] <= before[0] + 2
    assert after[2] <= before[2]
    assert after[3] <= before[3] + 300
    assert after[1] <= before[1] + (32 << 20)
    assert after[4] <= before[4] + (64 << 20)
    settle(tmp_path / "sock")
