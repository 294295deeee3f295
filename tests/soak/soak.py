"""Mixed load on both faces for hours, with kills of clients and daemon and changes of the capacity.

At the end every byte is verified against the workers' records. Exit status 0: nothing was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from kvcs import KvcsLowLevelClient, LLGetItemOpt
from tests.daemons import ROOT, Daemon
from tests.soak.record import Record

CAPACITIES = (16, 32, 64)  # MiB; the workers' keys want about 50
ACTION_SECONDS = (0.5, 4.0)


class Soak:
    """One run in a directory of its own."""

    def __init__(self, path: Path, minutes: float, workers: int, seed: int) -> None:
        self.path, self.workers = path, workers
        self.end = time.monotonic() + 60 * minutes
        self.dice = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        can_mount = os.geteuid() == 0 and Path("/dev/fuse").exists()
        self.mount = path / "below" / "mnt" if can_mount else None
        if self.mount:
            self._prepare(self.mount)
        (path / "data").mkdir()
        (path / "records").mkdir()
        self.configure(CAPACITIES[1])
        self.daemon = Daemon(path / "kvcsfs.toml")
        self.logs = [self._listen(self.daemon.process)]
        self.clients = [self.client(i) for i in range(workers)]

    @staticmethod
    def _prepare(mount: Path) -> None:
        """Make the mount point read-only below: while no daemon has it, a worker must not write there."""
        mount.parent.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "kvcsfs-soak", mount.parent], check=True)
        mount.mkdir()
        subprocess.run(["mount", "-o", "remount,ro", mount.parent], check=True)

    def close(self) -> None:
        """End everything that still runs, and unmount."""
        for client in self.clients:
            client.kill()
            client.wait()
        self.daemon.__exit__()
        if self.mount:
            subprocess.run(["umount", "-l", self.mount.parent], check=True)

    def configure(self, capacity: int) -> None:
        mount = f'mount = "{self.mount}"\n' if self.mount else ""
        (self.path / "kvcsfs.toml").write_text(
            f'[store]\nsocket = "{self.path}/sock"\n{mount}'
            f'[[mountpoints]]\npath = "{self.path}/data"\ncapacity = "{capacity}MiB"\n'
        )

    def client(self, number: int) -> subprocess.Popen[str]:
        """Start a worker; every third one on the mount."""
        face = "posix" if self.mount and number % 3 == 2 else "sdk"
        arguments = [face, number, self.workers, self.path / "sock", self.mount or "-", self.path / "records"]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.worker", *map(str, arguments)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self._listen(process)
        return process

    def _listen(self, process: subprocess.Popen[str]) -> threading.Thread:
        """Take what a process says: a daemon's log on stderr, a worker's findings on stdout."""
        source = process.stderr or process.stdout
        assert source is not None

        def take() -> None:
            for line in source:
                if "WRONG" in line or "Traceback" in line or "ERROR" in line:
                    self.wrong.append(line.rstrip())
                    print(line.rstrip(), flush=True)

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        return thread

    # -- what happens to them

    def kill_client(self) -> None:
        number = self.dice.randrange(self.workers)
        self.clients[number].kill()
        self.clients[number].wait()
        self.clients[number] = self.client(number)

    def kill_daemon(self) -> None:
        self.daemon.process.kill()
        self.daemon.process.wait()
        self.start_daemon()

    def restart_daemon(self) -> None:
        self.daemon.process.terminate()
        status = self.daemon.process.wait(timeout=60)
        if status != 0:
            self.wrong.append(f"the daemon ended with status {status}")
        self.start_daemon()

    def start_daemon(self) -> None:
        self.daemon.start()
        self._listen(self.daemon.process)

    def reload(self) -> None:
        self.configure(self.dice.choice(CAPACITIES))
        self.daemon.process.send_signal(1)

    def run(self) -> None:
        """Let things happen until the time is over."""
        actions = [self.kill_client] * 4 + [self.reload] * 3 + [self.kill_daemon] * 2 + [self.restart_daemon]
        while time.monotonic() < self.end and not self.wrong:
            time.sleep(self.dice.uniform(*ACTION_SECONDS))
            action = self.dice.choice(actions)
            self.counts[action.__name__] += 1
            action()
            if self.daemon.process.poll() is not None:
                self.wrong.append(f"the daemon ended by itself, status {self.daemon.process.returncode}")
                return
            for number, client in enumerate(self.clients):
                if client.poll() is not None:
                    self.wrong.append(f"worker {number} ended by itself")

    # -- the end

    def finish(self) -> None:
        """End the clients, and verify everything, before and after a restart."""
        for client in self.clients:
            client.kill()
            client.wait()
        self.verify("while it runs")
        self.restart_daemon()
        self.verify("after a restart")
        self.daemon.process.terminate()
        self.daemon.process.wait(timeout=60)
        self.command("fsck", str(self.path / "data"))

    def verify(self, when: str) -> None:
        """Compare every key on both faces with the records, and the books with the files."""
        records = [Record(self.path / "records" / str(i)) for i in range(self.workers)]
        found = 0
        with KvcsLowLevelClient(str(self.path / "sock")) as client:
            for record in records:
                for key in record.keys:
                    (got,) = client.ll_batch_get_items([LLGetItemOpt(key)])
                    seen = [got.data, *self._from_mount(key)]
                    self.wrong += [f"{when}: {w}" for value in seen if (w := record.complaint(key, value))]
                    if len({bytes(v) if v is not None else None for v in seen}) > 1:
                        self.wrong.append(f"{when}: {key}: the faces differ")
                    found += got.data is not None
        self.counts[f"values verified {when}"] = found
        self.command("verify", "--socket", str(self.path / "sock"))
        self.books(when)

    def _from_mount(self, key: str) -> list[bytes | None]:
        if self.mount is None:
            return []
        try:
            return [(self.mount / key).read_bytes()]
        except FileNotFoundError:
            return [None]

    def books(self, when: str) -> None:
        """The figures must be those of the files, and nothing be held."""
        end = time.monotonic() + 20
        while True:
            status = json.loads(self.command("status", "--json", "--socket", str(self.path / "sock")))
            (m,) = status["mountpoints"]
            on_disk = sum(p.stat().st_size for p in (self.path / "data" / "slots").rglob("*") if p.is_file())
            held = (status["leases"], status["reservations"], m["retired_bytes"])
            if (
                on_disk == m["used_bytes"] <= m["capacity_bytes"] and held == (0, 0, 0)
            ) or time.monotonic() > end:
                break
            time.sleep(0.1)
        if on_disk != m["used_bytes"] or held != (0, 0, 0) or on_disk > m["capacity_bytes"]:
            self.wrong.append(f"{when}: {on_disk} B on disk, held {held}, status {m}")

    def command(self, *arguments: str) -> str:
        """Run a kvcsfs command, which must succeed."""
        done = subprocess.run(
            [sys.executable, "-m", "kvcsfs.cli", *arguments],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            self.wrong.append(f"kvcsfs {arguments[0]}: {done.stdout[-500:]}{done.stderr[-500:]}")
        return done.stdout


def main() -> int:
    """Run, report, and say by the exit status whether anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (60)")
    parser.add_argument("--workers", type=int, default=6, help="client processes, a third on the mount (6)")
    parser.add_argument("--seed", type=int, default=None, help="of what happens to them")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.randrange(2**32)
    with tempfile.TemporaryDirectory(prefix="kvcsfs-soak-") as scratch:
        soak = Soak(Path(scratch), arguments.minutes, arguments.workers, seed)
        try:
            soak.run()
            if not soak.wrong:
                soak.finish()
        finally:
            soak.close()
        changes = sum(p.read_text().count("\nE ") for p in (Path(scratch) / "records").iterdir())
    soak.counts["changes acknowledged"] = changes
    print(f"soak of {arguments.minutes} minutes, seed {seed}")
    for name, count in sorted(soak.counts.items()):
        print(f"  {name.replace('_', ' ')}: {count}")
    for line in soak.wrong:
        print(f"  wrong: {line}")
    print("  nothing was wrong" if not soak.wrong else "  FAILED")
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
