"""Directory: one backing directory, locked to this process, and its epochs. Blocking.

An epoch is a life of a daemon with this directory; its number is the upper part of every number given in it.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import secrets
import stat
from pathlib import Path

from kvcsfs.engine import footer
from kvcsfs.engine.faults import point
from kvcsfs.engine.scan import FOLDERS
from kvcsfs.engine.syscalls import SAFE, write_all
from kvcsfs.errors import ConfigError

VERSION = 1
AWAY = "the backing directory was unmounted or replaced"
LET_GO = f"{AWAY}, and is let go until it is back"


class Directory:
    """Locks the directory, makes what must be in it, and begins an epoch. `root` is its descriptor.

    With the `store_id` that a directory had before it is that store or none: nothing is made or locked in another.
    All is done below `root`, as the path may lead elsewhere at any time.

    Raises ConfigError when it can't hold a store: not writable, a newer format, held by another daemon.
    """

    def __init__(self, path: Path, store_id: str = "") -> None:
        self.path = path
        self.root = self._lock = -1
        try:
            self.root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._lock = self._open("VERSION", os.O_RDWR | (0 if store_id else os.O_CREAT))
            if store_id and _text(self._lock).split()[2:] != [store_id]:
                raise ConfigError(LET_GO)
            self.store_id = self._claim()
            for name in ("slots", "epoch", *(f"slots/{i:02x}" for i in range(FOLDERS))):
                self._own(name)
            self._sync("slots")
            os.fsync(self.root)
            self.previous_epoch, self.previous_boot, self.epoch = self._begin_epoch()
        except OSError as exc:
            self.close()
            if store_id and isinstance(exc, FileNotFoundError | NotADirectoryError):
                raise ConfigError(LET_GO) from None
            raise unusable(path, exc) from exc
        except ConfigError:
            self.close()
            raise
        self._numbers = itertools.count((self.epoch << 40) + 1)

    def give_up(self) -> list[int]:
        """Forget the directory; returns its descriptors, to be closed. Calls below `root` fail from now on."""
        fds = [fd for fd in (self.root, self._lock) if fd >= 0]
        self.root = self._lock = -1
        return fds

    def close(self) -> None:
        """Give the directory up."""
        for fd in self.give_up():
            os.close(fd)

    def _claim(self) -> str:
        """Lock the directory by its file VERSION, and return the store's id."""
        fd, name = self._lock, self.path / "VERSION"
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self.path}: in use by another kvcsfs daemon") from None
        words = _text(fd).split()
        if not words:
            words = ["kvcsfs", str(VERSION), secrets.token_hex(8)]
            os.pwrite(fd, f"{' '.join(words)}\n".encode(), 0)
            os.fsync(fd)
        elif len(words) != 3 or words[0] != "kvcsfs" or not words[1].isdecimal():
            raise ConfigError(f"{name}: not a kvcsfs data directory; give an empty directory")
        elif int(words[1]) > VERSION:
            raise ConfigError(
                f"{name}: format {words[1]}, this version reads up to {VERSION}; use a newer kvcsfs"
            )
        return words[2]

    def _own(self, name: str) -> None:
        """Make a directory that is private to us. Raises ConfigError for a symbolic link, which is never followed."""
        try:
            os.mkdir(name, 0o700, dir_fd=self.root)
        except FileExistsError:
            mode = os.stat(name, dir_fd=self.root, follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                raise ConfigError(f"{self.path / name}: a symbolic link, expected a directory") from None
            if not stat.S_ISDIR(mode):
                raise

    def _sync(self, name: str) -> None:
        """fsync a directory, so that the names in it are on disk."""
        fd = self._open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | SAFE, 0o600, dir_fd=self.root)

    def _begin_epoch(self) -> tuple[int, str, int]:
        """Return the last epoch, the boot it ran in, and the new one. Its file is made O_EXCL and synced."""
        known = self._epochs()
        previous = known[-1] if known else 0
        boot = ""
        if known:
            fd = self._open(f"epoch/{previous}", os.O_RDONLY)
            try:
                boot = _text(fd)
            finally:
                os.close(fd)
        fd = self._open(f"epoch/{previous + 1}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            point("epoch.made")
            os.write(fd, boot_id().encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        self._sync("epoch")
        point("epoch.synced")
        for old in known:
            os.unlink(f"epoch/{old}", dir_fd=self.root)
        return previous, boot, previous + 1

    def _epochs(self) -> list[int]:
        fd = self._open("epoch", os.O_RDONLY | os.O_DIRECTORY)
        try:
            return sorted(int(name) for name in os.listdir(fd) if name.isdecimal())
        finally:
            os.close(fd)

    def file_system(self) -> str:
        """The type of the file system, from the mount table, as statvfs doesn't tell."""
        device = os.fstat(self.root).st_dev
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


def _text(fd: int) -> str:
    """What a small file says."""
    return os.pread(fd, 4096, 0).decode(errors="replace").strip()


def unusable(path: Path, exc: OSError) -> ConfigError:
    """Why a directory can't hold a store, if a call on it fails."""
    return ConfigError(f"{path}: can't be used as a data directory: {exc.strerror}")


def boot_id() -> str:
    """The id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
