"""Directory: one backing directory, locked to this process, and its epochs. Blocking.

An epoch is a life of a daemon with this directory; its number is the upper part of every number given in it.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import secrets
from pathlib import Path

from kvcsfs.engine import footer
from kvcsfs.engine.faults import point
from kvcsfs.engine.scan import FOLDERS
from kvcsfs.engine.syscalls import SAFE, sync_directory, write_all
from kvcsfs.errors import ConfigError

VERSION = 1


class Directory:
    """Locks the directory, makes what must be in it, and begins an epoch. `root` is its descriptor.

    Raises ConfigError when it can't hold a store: not writable, a newer format, held by another daemon.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = self._claim()
        try:
            for name in ("slots", "epoch", *(f"slots/{i:02x}" for i in range(FOLDERS))):
                _own_directory(path / name)
            sync_directory(path / "slots")
            sync_directory(path)
            self.root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self.previous_epoch, self.previous_boot, self.epoch = self._begin_epoch()
        except OSError as exc:
            os.close(self._lock)
            raise unusable(path, exc) from exc
        except ConfigError:
            os.close(self._lock)
            raise
        self._numbers = itertools.count((self.epoch << 40) + 1)

    def close(self) -> None:
        """Give the directory up."""
        os.close(self.root)
        os.close(self._lock)

    def _claim(self) -> int:
        name = self.path / "VERSION"
        try:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | SAFE, 0o600)
        except OSError as exc:
            raise unusable(self.path, exc) from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            text = os.pread(fd, 4096, 0).decode(errors="replace").split()
            if not text:
                os.pwrite(fd, f"kvcsfs {VERSION} {secrets.token_hex(8)}\n".encode(), 0)
                os.fsync(fd)
            elif len(text) != 3 or text[0] != "kvcsfs" or not text[1].isdigit():
                raise ConfigError(f"{name}: not a kvcsfs data directory; give an empty directory")
            elif int(text[1]) > VERSION:
                raise ConfigError(
                    f"{name}: format {text[1]}, this version reads up to {VERSION}; use a newer kvcsfs"
                )
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(f"{self.path}: in use by another kvcsfs daemon") from None
        except OSError as exc:
            os.close(fd)
            raise unusable(self.path, exc) from exc
        except ConfigError:
            os.close(fd)
            raise
        return fd

    def _begin_epoch(self) -> tuple[int, str, int]:
        """Return the last epoch, the boot it ran in, and the new one. Its file is made O_EXCL and synced."""
        folder = self.path / "epoch"
        known = sorted(int(name) for name in os.listdir(folder) if name.isdigit())
        previous = known[-1] if known else 0
        boot = (folder / str(previous)).read_text(errors="replace").strip() if known else ""
        fd = os.open(folder / str(previous + 1), os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFE, 0o600)
        try:
            point("epoch.made")
            os.write(fd, boot_id().encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_directory(folder)
        point("epoch.synced")
        for old in known:
            os.unlink(folder / str(old))
        return previous, boot, previous + 1

    def file_system(self) -> str:
        """The type of the file system, from the mount table, as statvfs doesn't tell."""
        device = os.stat(self.path).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table:
            for line in table:
                left, _, right = line.partition(" - ")
                if left.split()[2] == wanted:
                    return right.split()[0]
        return ""

    def resume_after(self, generation: int) -> None:
        """Give no number up to `generation`: the directory `epoch` may be older than the slots, or have been lost."""
        if generation >> 40 >= self.epoch:
            self._numbers = itertools.count(generation + 1)

    def number(self) -> int:
        """A number that was never given before, in this life or an earlier one: slot ids and generations."""
        return next(self._numbers)

    def is_there(self) -> bool:
        """Whether the path still leads to the directory that was opened: it may be unmounted or replaced."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.root))
        except OSError:
            return False

    def try_write(self) -> None:
        """Write a file and remove it. Raises the OSError that any other write would get."""
        fd = os.open("probe", os.O_WRONLY | os.O_CREAT | SAFE, 0o600, dir_fd=self.root)
        try:
            write_all(fd, footer.VOID, 0)
            os.fsync(fd)
        finally:
            os.close(fd)
            os.unlink("probe", dir_fd=self.root)


def _own_directory(path: Path) -> None:
    """Make a directory that is private to us. Raises ConfigError for a symbolic link, which is never followed."""
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink():
        raise ConfigError(f"{path}: a symbolic link, expected a directory")


def unusable(path: Path, exc: OSError) -> ConfigError:
    """Why a directory can't hold a store, if a call on it fails."""
    return ConfigError(f"{path}: can't be used as a data directory: {exc.strerror}")


def boot_id() -> str:
    """The id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
