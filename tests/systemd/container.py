"""A real systemd as PID 1 of a container made of the host's own files, with the units of this checkout in it.

Needs root, /dev/fuse, overlay, cgroup 2 and the package systemd; no network and no image.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

ROOT = Path(__file__).resolve().parents[2]
SYSTEMD = Path("/lib/systemd/systemd")
BOOT_SECONDS = 60.0
FILES = {
    "kvcsfs.service": "/etc/systemd/system/kvcsfs.service",
    "kvcsfs@.service": "/etc/systemd/system/kvcsfs@.service",
    "kvcsfs.sysusers.conf": "/etc/sysusers.d/kvcsfs.conf",
}
T = TypeVar("T")


def missing() -> str:
    """Why systemd can't be booted here; "" if it can."""
    if os.geteuid() != 0:
        return "needs root"
    for tool in ("unshare", "nsenter", "pivot_root", "systemctl"):
        if not shutil.which(tool):
            return f"{tool} is missing"
    for need in (SYSTEMD, Path("/dev/fuse")):
        if not need.exists():
            return f"{need} is missing"
    if _cgroups() is None:
        return "cgroup 2 isn't mounted"
    return "" if "\toverlay\n" in Path("/proc/filesystems").read_text() else "the kernel has no overlay"


def _cgroups() -> Path | None:
    """Where the host has cgroup 2."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split(" ")
        if kind == "cgroup2":
            return Path(place)
    return None


def until(look: Callable[[], T], seconds: float = 20.0) -> T:
    """Look again until what is found is true, and return it."""
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, f"not so after {seconds} s: {look}"
        time.sleep(0.02)
    return found


class Container:
    """The container, booted. `with` ends it."""

    def __init__(self, scratch: Path) -> None:
        group = _cgroups()
        assert group is not None
        # systemd makes its groups below the one that it starts in: that must not be the host's root group.
        self._group = group / f"kvcsfs-test-{os.getpid()}"
        self._group.mkdir()
        shown = {str(ROOT), sys.prefix, sys.base_prefix} - {"/usr"}
        self._console = open(scratch / "console.log", "wb")  # noqa: SIM115 closed with the container
        boot = [
            "unshare",
            "--mount",
            "--pid",
            "--uts",
            "--ipc",
            "--net",
            "--cgroup",
            "--fork",
            "--kill-child",
        ]
        boot += ["sh", str(Path(__file__).with_name("boot.sh")), str(scratch), *sorted(shown)]
        enter = f'echo $$ >{self._group}/cgroup.procs && exec "$@"'
        self._process = subprocess.Popen(
            ["sh", "-c", enter, "sh", *boot],
            stdin=subprocess.DEVNULL, stdout=self._console, stderr=self._console,
        )  # fmt: skip
        self._log = scratch / "console.log"
        try:
            self._leader = until(self._booted, BOOT_SECONDS)
            self._install()
        except BaseException:
            self.close()
            raise

    def _booted(self) -> int:
        """The host's number of the container's PID 1, once it runs; 0 before."""
        assert self._process.poll() is None, f"boot failed: {self._log.read_text()}"
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        if not children:
            return 0
        self._leader = int(children[0])
        state = self.run("systemctl", "is-system-running", check=False).stdout.strip()
        return self._leader if state in ("running", "degraded") else 0

    def _install(self) -> None:
        """Put the units and a `kvcsfs` where a package would."""
        self.write("/opt/kvcsfs/bin/kvcsfs", LAUNCHER.format(python=sys.executable, root=str(ROOT)))
        self.run("chmod", "755", "/opt/kvcsfs/bin/kvcsfs")
        for name, place in FILES.items():
            self.write(place, (ROOT / "systemd" / name).read_text())
        # As udev makes it. The device itself is the host's, so the container gets a node of its own.
        self.sh("umount /dev/fuse; rm /dev/fuse; mknod -m 666 /dev/fuse c 10 229")
        self.run("systemd-sysusers")
        self.run("systemctl", "daemon-reload")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything in it."""
        self._process.kill()  # --kill-child: PID 1 goes with it, and with PID 1 all the others
        self._process.wait()
        self._console.close()
        until(lambda: not (self._group / "cgroup.procs").read_text())
        until(self._groups_gone)

    def _groups_gone(self) -> bool:
        for folder, _, _ in os.walk(self._group, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:
                return False
        return not self._group.exists()

    # -- what a test does in it

    def run(
        self, *command: str, check: bool = True, text: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in it, outside of every unit."""
        enter = ["nsenter", "-t", str(self._leader), "-m", "-u", "-i", "-n", "-p", "-C", "--"]
        done = subprocess.run(
            [*enter, *command], input=text, capture_output=True, text=True, check=False, timeout=120
        )
        if check and done.returncode != 0:
            log = self.run("journalctl", "--no-pager", "-o", "cat", "-n", "20", check=False).stdout
            raise AssertionError(f"{command}: {done.stdout}{done.stderr}{log}")
        return done

    def sh(self, script: str, check: bool = True) -> str:
        """Run a shell script in it; what it printed."""
        return self.run("sh", "-c", script, check=check).stdout

    def write(self, path: str, text: str) -> None:
        """Write a file in it."""
        self.run("sh", "-c", f"mkdir -p {Path(path).parent} && cat >{path}", text=text)

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.run("systemctl", "show", "-P", name, unit).stdout.strip()

    def mounts(self, path: str) -> int:
        """How many mounts of ours lie at a path, seen from outside the unit."""
        return sum(
            line.split(" ")[1:3] == [path, "fuse.kvcsfs"]
            for line in self.sh("cat /proc/self/mounts").splitlines()
        )

    def status(self, socket: str) -> dict[str, Any]:
        """What `kvcsfs status` says."""
        done = self.run("/opt/kvcsfs/bin/kvcsfs", "status", "--json", "--socket", socket)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def journal(self, unit: str) -> str:
        """What a unit logged."""
        return self.run("journalctl", "--no-pager", "-o", "cat", "-u", unit).stdout


LAUNCHER = """#!{python}
import sys

sys.path.insert(0, {root!r})
from kvcsfs.cli import main

sys.exit(main())
"""
