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

from kvcsfs import config, wire
from kvcsfs.config import Config
from kvcsfs.control import Control
from tests.stores import bytes_on_disk, keys, running

pytestmark = pytest.mark.fault

KILLS = int(os.environ.get("KVCSFS_KILLS", "30"))
KEPT, EVICTED = 0, 1  # mountpoints: one has room for all, one evicts all the time


class Store:
    """The daemon's configuration and its lives."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.life, self.lives = directory, directory / "life", 0
        self.said: list[str] = []
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

    def recovered(self, daemon: subprocess.Popen[str]) -> None:
        """Wait until a daemon has all its entries: it says that it is ready earlier, when it recovers for long."""
        assert daemon.stdout is not None
        assert "ready" in daemon.stdout.readline(), (self.directory / "daemon.log").read_text()
        with Control(str(self.directory / "sock")) as control:
            while "recovering" in [
                m["state"] for m in control.ask(wire.Status(2), wire.StatusReply).status["mountpoints"]
            ]:
                time.sleep(0.01)

    def say(self, text: str) -> None:
        """Tell the clients, in one step."""
        self.said.append(f"{time.monotonic():.4f}: {text}")
        self.life.with_suffix(".new").write_text(text)
        self.life.with_suffix(".new").rename(self.life)

    def live(self, seconds: float, wait: bool) -> None:
        """One life of the daemon; without `wait` it may be killed before it has recovered."""
        with self.start() as daemon:
            if wait:
                self.recovered(daemon)
                self.lives += 1
                self.say(str(self.lives))
            time.sleep(seconds)
            self.say("down")
            daemon.kill()
            assert daemon.wait() == -signal.SIGKILL

    def story(self, wrong: list[str]) -> str:
        """What clients found wrong, and what they can't know: when the lives began and ended, what the daemon said."""
        log = (self.directory / "daemon.log").read_text()
        return "\n".join([*wrong, "lives:", *self.said[-20:], "the daemon's log:", log[-4000:]])

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
        if any(client.poll() is not None for client in clients):
            break  # it found something wrong
        store.live(rng.uniform(0, 0.4), wait=rng.random() < 0.8)
        if number % 5 == 4:
            trio.run(store.examine)
    with store.start() as daemon:
        store.recovered(daemon)
        store.say("last")
        time.sleep(0.2)
        reports = [json.loads(client.communicate("stop", timeout=30)[0]) for client in clients]
        daemon.terminate()
        assert daemon.wait(20) == 0
    wrong = [what for report in reports for what in report["wrong"]]
    assert not wrong, store.story(wrong)
    counts: Counter[str] = Counter()
    for report in reports:
        counts.update(report["counts"])
    print(dict(counts))
    assert counts["hits"] > KILLS and counts["put 0"] > KILLS and counts["delete 0"] > KILLS / 5
    trio.run(store.examine)
