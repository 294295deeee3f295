"""A daemon in a process of its own, as `kvcsfs serve` runs it."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[1]


def store_file(base: Path, *points: Path, capacity: str = "64MiB", mount: bool = False) -> Path:
    """Write `base / "kvcsfs.toml"`: the socket is `base / "sock"`, the mount `base / "mnt"`.

    The mountpoints are at `points`; without any there is one, at `base / "data"`, which is made. Several are pooled.
    """
    if not points:
        points = (base / "data",)
        points[0].mkdir()
    lines = ["[store]", f'socket = "{base}/sock"']
    if mount:
        lines.append(f'mount = "{base}/mnt"')
    if len(points) > 1:
        lines.append('backend = "pooled"')
    for point in points:
        lines += ["[[mountpoints]]", f'path = "{point}"', f'capacity = "{capacity}"']
    file = base / "kvcsfs.toml"
    file.write_text("\n".join(lines) + "\n")
    return file


class Daemon:
    """`kvcsfs serve` with a configuration file. `prelude` is Python that runs before, such as a shorter patience."""

    def __init__(self, config: Path, prelude: str = "") -> None:
        self.mount = tomllib.loads(config.read_text()).get("store", {}).get("mount")
        path = f"import sys; sys.path.insert(0, {str(ROOT)!r})"
        code = f"{path}\n{prelude}\nfrom kvcsfs.cli import main; sys.exit(main())"
        self._command = [sys.executable, "-c", code, "serve", "--config", str(config)]
        self.start()

    def start(self) -> None:
        """Start it, and wait until it says ready."""
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("kvcsfs ready"):
            raise RuntimeError(f"no daemon: {line}{self.process.communicate()[1]}")

    def stop(self, seconds: float = 20.0) -> str:
        """SIGTERM; what it logged."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.communicate(timeout=seconds)[1]

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.kill()
            if self.mount:
                subprocess.run(["umount", "-l", self.mount], check=False)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
