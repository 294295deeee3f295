"""`kvcsfs verify` beside a daemon that serves, and `kvcsfs fsck` on a store that none does."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcsfs.sdk import KvcsLowLevelClient, LLGetItemOpt, LLPutItem
from tests.stores import bytes_on_disk, slot_files

pytestmark = pytest.mark.fault

VALUES = {f"m/{i:02}": f"value {i:02} ".encode() * 60_000 for i in range(20)}  # 540 KB each


class Daemon:
    """`kvcsfs serve` on a directory, and the command line against it."""

    def __init__(self, directory: Path) -> None:
        self.data, self.socket = directory / "data", str(directory / "sock")
        self.data.mkdir()

    def start(self) -> None:
        options = ["--data", str(self.data), "--capacity", "64MiB", "--socket", self.socket]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvcsfs.cli", "serve", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert "ready" in self.process.stdout.readline()

    def stop(self, number: int = signal.SIGTERM) -> str:
        self.process.send_signal(number)
        return self.process.communicate(timeout=20)[1]

    def verify(self, *options: str) -> list[str]:
        return [sys.executable, "-m", "kvcsfs.cli", "verify", "--socket", self.socket, *options]

    def fsck(self, *options: str) -> list[str]:
        return [sys.executable, "-m", "kvcsfs.cli", "fsck", str(self.data), *options]

    def break_values(self, *keys: str) -> None:
        for path in slot_files(self.data):
            with open(path, "r+b") as file:
                if any(file.read(100) == VALUES[key][:100] for key in keys if file.seek(0) == 0):
                    file.seek(5000)
                    file.write(b"?")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """One that holds VALUES."""
    made = Daemon(tmp_path)
    made.start()
    with KvcsLowLevelClient(made.socket) as client:
        results = client.ll_batch_put([LLPutItem(k, v) for k, v in VALUES.items()])
        assert {r.status for r in results} == {0}
    yield made
    if made.process.poll() is None:
        made.stop()


def run(command: list[str]) -> tuple[int, str, str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def held(daemon: Daemon) -> list[str]:
    with KvcsLowLevelClient(daemon.socket) as client:
        results = client.ll_batch_get_items([LLGetItemOpt(k) for k in VALUES])
    assert all(r.data == VALUES[r.key] for r in results if r.data is not None)
    return [r.key for r in results if r.data is not None]


def test_verify_finds_what_is_wrong_once(daemon):
    total = sum(map(len, VALUES.values()))
    code, out, err = run(daemon.verify("--json"))
    expected = {"mountpoint": 0, "entries": 20, "bytes": total, "dropped": []}
    assert (code, json.loads(out), err) == (0, [expected], "")
    daemon.break_values("m/03", "m/17")
    code, out, err = run(daemon.verify("--rate", "0"))
    assert (code, err) == (1, "")
    assert out.splitlines()[1:] == ["  dropped m/03", "  dropped m/17"]
    assert run(daemon.verify())[0] == 0
    assert held(daemon) == [k for k in VALUES if k not in {"m/03", "m/17"}]
    assert "dropped 2 entries" in daemon.stop()


def test_verify_goes_on_where_it_is_told(daemon):
    daemon.break_values("m/03")
    code, out, _ = run(daemon.verify("--json", "--after", "m/09"))
    assert (code, json.loads(out)[0]["entries"]) == (0, 10)


def test_verify_shows_how_far_it_is_and_says_how_to_go_on(daemon):
    terminal, slave = pty.openpty()
    command = daemon.verify("--rate", "2MiB")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=slave) as process:
        os.close(slave)
        shown = b""
        while b"] 2/10 MiB read" not in shown:
            shown += os.read(terminal, 1000)
        process.send_signal(signal.SIGINT)
        while b"\n" not in shown:
            shown += os.read(terminal, 1000)
        assert process.wait(10) == 130
    os.close(terminal)
    assert b"go on with: kvcsfs verify --mountpoint 0 --after m/" in shown


def test_verify_needs_a_daemon(tmp_path):
    code, _, err = run(Daemon(tmp_path).verify())
    assert (code, err.count("\n")) == (1, 1)
    assert "no daemon answers" in err


def test_fsck_is_refused_while_a_daemon_serves_or_there_is_no_store(daemon, tmp_path):
    assert run(daemon.fsck()) == (2, "", f"kvcsfs: {daemon.data}: in use by another kvcsfs daemon\n")
    (tmp_path / "none").mkdir()
    code, _, err = run([sys.executable, "-m", "kvcsfs.cli", "fsck", str(tmp_path / "none")])
    assert (code, err.count("\n")) == (2, 1)
    assert "not a kvcsfs data directory" in err
    assert list((tmp_path / "none").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_fsck_finds_what_is_wrong_and_leaves_a_clean_store(daemon, number):
    daemon.stop(number)
    daemon.break_values("m/05")
    code, out, err = run(daemon.fsck("--json"))
    found = json.loads(out)
    assert (code, found["entries"], found["dropped"], err) == (1, 20, ["m/05"], "")
    code, out, _ = run(daemon.fsck())
    assert code == 0
    assert "19 entries" in out
    daemon.start()
    with KvcsLowLevelClient(daemon.socket, verify_reads=False) as client:
        assert len([r for r in client.ll_batch_get_items([LLGetItemOpt(k) for k in VALUES]) if r.data]) == 19
    status = json.loads(
        run([sys.executable, "-m", "kvcsfs.cli", "status", "--socket", daemon.socket, "--json"])[1]
    )
    (point,) = status["mountpoints"]
    assert (point["entries"], point["scrub_total_bytes"]) == (19, 0), "it was left as after a clean stop"
    assert point["used_bytes"] == bytes_on_disk(daemon.data)
