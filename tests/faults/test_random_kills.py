"""kill -9 of the real daemon at random moments under load. `KVCSFS_KILLS` says how often."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from kvcsfs import config
from kvcsfs.config import Config
from tests.stores import bytes_on_disk, keys, running

pytestmark = pytest.mark.fault

KILLS = int(os.environ.get("KVCSFS_KILLS", "30"))
KEPT, EVICTED = 0, 1  # mountpoints: one has room for all, one evicts all the time


class Store:
    """The daemon's configuration and its lives."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.life, self.lives = directory, directory / "life", 0
        self.file = directory / "kvcsfs.toml"
        tables = []
        for name, capacity in (("kept", "64MiB"), ("evicted", "2MiB")):
            (directory / name).mkdir()
            tables.append(f'[[mountpoints]]\npath = "{directory / name}"\ncapacity = "{capacity}"\n')
        head = f'[store]\nsocket = "{directory / "sock"}"\nbackend = "pooled"\n'
        self.file.write_text(head + "".join(tables))
        self.life.write_text("down")

    @property
    def config(self) -> Config:
        return config.load(self.file, {})

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvcsfs.cli", "serve", "--config", str(self.file)]
        with open(self.directory / "daemon.log", "a") as log:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)

    def say(self, text: str) -> None:
        """Tell the clients, in one step."""
        self.life.with_suffix(".new").write_text(text)
        self.life.with_suffix(".new").rename(self.life)

    def live(self, seconds: float, wait: bool) -> None:
        """One life of the daemon; without `wait` it may be killed before it is ready."""
        with self.start() as daemon:
            assert daemon.stdout is not None
            if wait:
                assert "ready" in daemon.stdout.readline(), (self.directory / "daemon.log").read_text()
                self.lives += 1
                self.say(str(self.lives))
            time.sleep(seconds)
            self.say("down")
            daemon.kill()
            assert daemon.wait() == -signal.SIGKILL

    async def examine(self) -> None:
        """Every byte on disk is counted, and every value is whole."""
        async with running(self.config) as engine:
            for volume in engine.volumes:
                assert volume.catalog.ledger.used == bytes_on_disk(volume.config.path)
                names = await keys(engine, volume.index)
                assert 0 not in await engine.verify_many(volume.index, names)


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    made: list[subprocess.Popen[str]] = []
    yield made
    for client in made:
        client.kill()
        client.communicate()


def test_random_kills_under_load(tmp_path, clients):
    store, rng = Store(tmp_path), random.Random(os.environ.get("KVCSFS_SEED", "1"))
    for seed, kind in enumerate(["kept", "kept", "evicted", "evicted"]):
        mountpoint = KEPT if kind == "kept" else EVICTED
        script = [
            sys.executable,
            "-m",
            "tests.faults.load",
            tmp_path / "sock",
            store.life,
            seed,
            mountpoint,
            kind,
        ]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        clients.append(subprocess.Popen([str(s) for s in script], text=True, **pipes))
    for number in range(KILLS):
        store.live(rng.uniform(0, 0.4), wait=rng.random() < 0.8)
        if number % 5 == 4:
            trio.run(store.examine)
    with store.start() as daemon:
        assert daemon.stdout is not None
        assert "ready" in daemon.stdout.readline()
        store.say("last")
        time.sleep(0.2)
        reports = [json.loads(client.communicate("stop", timeout=30)[0]) for client in clients]
        daemon.terminate()
        assert daemon.wait(20) == 0
    counts: Counter[str] = Counter()
    for report in reports:
        assert report["wrong"] == []
        counts.update(report["counts"])
    print(dict(counts))
    assert counts["hits"] > KILLS and counts["put 0"] > KILLS and counts["delete 0"] > KILLS / 5
    trio.run(store.examine)
