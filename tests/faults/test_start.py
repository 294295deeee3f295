"""A start that takes long: the daemon answers meanwhile, tells how far it is, and can be stopped."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from kvcsfs import daemon, wire
from kvcsfs.engine import lane, recovery, scan, volumes
from kvcsfs.engine.engine import Engine
from kvcsfs.engine.recovery import Watch
from kvcsfs.engine.store import SlotStore
from tests.rawclient import RawClient
from tests.stores import config, stored

pytestmark = pytest.mark.fault


class Systemd:
    """The socket that a service tells its state."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))

    def until(self, text: str) -> str:
        while text not in (told := self.socket.recv(4096).decode()):
            pass
        return told


def slow(go: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery reads three entries of ten, then waits for `go`."""
    real = recovery.recover

    def recover(store: SlotStore, watch: Watch) -> recovery.Found:
        watch.passed(3, 0.3)
        while not go.wait(0.01):
            watch.passed(3, 0.3)
        return real(store, watch)

    monkeypatch.setattr(recovery, "recover", recover)
    monkeypatch.setattr(daemon, "EARLY_SECONDS", 0.01)
    monkeypatch.setattr(daemon, "PROGRESS_SECONDS", 0.01)


def state(path: Path) -> tuple[str, int, float]:
    with RawClient(path) as client:
        (point,) = client.ask(wire.Status(2), wire.StatusReply).status["mountpoints"]
    return point["state"], point["recovered_entries"], point["recovered_share"]


async def serve(settings: object, user: object) -> None:
    """Run the daemon in this process, `user` beside it in a thread; then stop it as systemd does."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(daemon._serve, lambda: settings)
        await trio.to_thread.run_sync(user)
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def systemd(tmp_path, monkeypatch):
    made = Systemd(tmp_path / "notify", monkeypatch)
    yield made
    made.socket.close()


async def test_the_daemon_answers_and_tells_while_it_recovers(tmp_path, monkeypatch, systemd, capsys):
    go, settings = threading.Event(), config(tmp_path)
    slow(go, monkeypatch)

    def user() -> None:
        systemd.until("READY=1")
        assert "STATUS=recovering, 30%, 3 entries read; socket=" in systemd.until("STATUS=")
        assert state(settings.socket) == ("recovering", 3, 0.3)
        go.set()
        systemd.until("STATUS=serving, socket=")
        assert state(settings.socket)[0] == "ready"

    with trio.fail_after(60):
        await serve(settings, user)
    assert "kvcsfs ready socket=" in capsys.readouterr().out


async def test_a_stop_waits_neither_for_recovery_nor_for_systemd(
    tmp_path, monkeypatch, systemd, capsys, expected_warnings
):
    expected_warnings.append("systemd could not be told STOPPING=1: timed out")
    go, settings = threading.Event(), config(tmp_path)
    slow(go, monkeypatch)

    def user() -> None:
        systemd.until("READY=1")
        time.sleep(0.5)  # progress is told meanwhile, and the socket soon takes no more

    with trio.fail_after(5):
        await serve(settings, user)
    assert not go.is_set()
    assert not (settings.mountpoints[0].path / "snapshot").exists()


async def test_garbage_is_collected_although_a_recovery_hangs(tmp_path, monkeypatch, expected_warnings):
    expected_warnings.append("data1: the backing file system doesn't answer")
    for name in ("PROBE_SECONDS", "LOOK_SECONDS"):
        monkeypatch.setattr(lane, name, 0.01)
    monkeypatch.setattr(volumes, "CHECKPOINT_SECONDS", 0.01)
    go, real, probe = threading.Event(), recovery.recover, SlotStore.probe

    def hang(store: SlotStore) -> None:
        if store.directory.path.name == "data1":
            go.wait()

    monkeypatch.setattr(recovery, "recover", lambda store, watch: (hang(store), real(store, watch))[1])
    monkeypatch.setattr(SlotStore, "probe", lambda store: (hang(store), probe(store))[1])
    engine = Engine(config(tmp_path, mountpoints=2, backend="pooled"))
    async with engine.running():
        try:
            with trio.fail_after(10):
                while engine.volumes[0].recovering:
                    await trio.sleep(0.001)
                assert not engine.volumes[1].lane.hung and not gc.isenabled()
                monkeypatch.setattr(
                    lane, "LATE_SECONDS", 0.01
                )  # not before: the other's recovery may take longer
                while not gc.isenabled():
                    await trio.sleep(0.01)
        finally:
            go.set()
        with trio.fail_after(10):
            await engine.volumes.recovered()
    assert gc.isenabled()


# What the first of two processes does in place of its work, in a shell, and how many folders it takes along.
FIRST = {
    "reads": (":", 0),
    "fails at once": ("exit 1", 0),
    "takes a folder and dies": ("exec dd bs=1 count=1 of=/dev/null", 1),
    "dies in the middle of a folder": (r"dd bs=1 count=1 of=/dev/null; printf '\010\144\0\0\0half'; exit", 1),
    "hangs before it took one": ("exec sleep 1000", 0),
}


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have two processes read even a small store; the result has the folders that are read by this one."""
    here: list[int] = []
    real: Callable[[int, int], scan.Folder] = scan.read_folder

    def read_folder(slots: int, number: int) -> scan.Folder:
        here.append(number)
        return real(slots, number)

    monkeypatch.setattr(scan, "read_folder", read_folder)
    monkeypatch.setattr(scan, "PARALLEL_ENTRIES", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    return here


@pytest.mark.parametrize("first", FIRST)
def test_processes_read_a_large_store(tmp_path, monkeypatch, first):
    """They find what one process finds; what one doesn't come to the other does, here only what went with it is read.

    All slots are in every second folder, as puts of one key at a time leave them.
    """
    instead, taken = FIRST[first]
    store = SlotStore(tmp_path)
    for i in range(600):
        stored(store, f"k{i}", b"x")
    alone = [scan.read_folder(store.slots, i) for i in range(scan.FOLDERS)]
    here = counted(monkeypatch)
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nmkdir {tmp_path}/begun && {{ {instead}; }}\nexec {sys.executable} "$@"\n')
    program.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(program))
    found = list(scan.scan(store.slots))
    assert sorted(found, key=lambda folder: folder.rows) == sorted(alone, key=lambda folder: folder.rows)
    assert sum(len(folder.rows) for folder in found) == 600
    assert here[: scan.SAMPLE] == list(range(scan.SAMPLE))
    assert len(here) == scan.SAMPLE + taken
    store.close()


def test_without_processes_a_large_store_is_read_here(tmp_path, monkeypatch):
    store = SlotStore(tmp_path)
    for i in range(600):
        stored(store, f"k{i}", b"x")
    here = counted(monkeypatch)
    monkeypatch.setattr("sys.executable", "/no/such/program")
    assert sum(len(folder.rows) for folder in scan.scan(store.slots)) == 600
    assert here == list(range(scan.FOLDERS))
    store.close()
