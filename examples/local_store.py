"""A kvcsfs daemon of one's own, below one directory: started, stopped, restarted and cleared away."""

import contextlib
import json
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

READY_SECONDS = 30.0
STOP_SECONDS = 30.0


class StoreError(Exception):
    """The daemon could not be started, or did not stop."""


class LocalStore:
    """One daemon with data, mount and socket below `home`, which starts out empty."""

    def __init__(self, home: Path, capacity_bytes: int) -> None:
        self.home, self.capacity_bytes = home, capacity_bytes
        self.mount, self.socket, self.log = home / "mnt", home / "kvcs.sock", home / "daemon.log"
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._unmount()
        shutil.rmtree(self.home, ignore_errors=True)
        self.mount.mkdir(parents=True)
        (self.home / "data").mkdir()
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the daemon; wait until socket and mount answer and the values of an earlier run are known."""
        command = [
            sys.executable, "-m", "kvcsfs.cli", "serve",
            "--data", str(self.home / "data"), "--capacity", str(self.capacity_bytes),
            "--mount", str(self.mount), "--socket", str(self.socket),
        ]  # fmt: skip
        with self.log.open("ab") as sink:
            # A session of its own: Ctrl-C in the terminal must not unmount below a running example.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], READY_SECONDS)
        line = self._process.stdout.readline() if readable else ""
        if not line.startswith("kvcsfs ready"):
            raise StoreError(f"the daemon did not become ready: {self._last_words()}")
        self._wait_for_recovery()

    def stop(self) -> None:
        """End the daemon as a service manager would (SIGTERM), and see that the mount is gone."""
        process, self._process = self._process, None
        if process is not None:
            with process:
                process.terminate()
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    raise StoreError(f"the daemon did not stop within {STOP_SECONDS:.0f} s: killed") from None
                finally:
                    process.kill()  # does nothing to one that has ended; a second Ctrl-C comes here too
        self._unmount()

    def restart(self) -> None:
        self.stop()
        self.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def _wait_for_recovery(self) -> None:
        """A daemon answers while it still reads its directory, and what it hasn't read yet is a miss till then."""
        command = [sys.executable, "-m", "kvcsfs.cli", "status", "--json", "--socket", str(self.socket)]
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            asked = subprocess.run(command, capture_output=True, text=True, check=False)
            if asked.returncode != 0:
                raise StoreError(f"the daemon does not say how it is: {asked.stderr.strip()}")
            if all(mountpoint["state"] == "ready" for mountpoint in json.loads(asked.stdout)["mountpoints"]):
                return
            time.sleep(0.05)
        raise StoreError(f"the daemon is still recovering after {READY_SECONDS:.0f} s; its log is {self.log}")

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else f"it logged nothing within {READY_SECONDS:.0f} s"

    def _unmount(self) -> None:
        """Detach a mount that a killed daemon left behind.

        The mount table is asked, since stat(2) and ismount() of a dead mount answer from the kernel's cache.
        """
        table = Path("/proc/self/mounts")
        while f" {self.mount} fuse" in table.read_text():
            done = False
            for tool in (["fusermount3", "-u", "-z"], ["umount", "-l"]):
                with contextlib.suppress(FileNotFoundError):
                    done = (
                        done
                        or subprocess.run([*tool, self.mount], capture_output=True, check=False).returncode
                        == 0
                    )
            if not done:
                raise StoreError(f"{self.mount} cannot be unmounted; run as root: umount -l {self.mount}")
