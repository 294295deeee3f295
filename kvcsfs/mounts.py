"""Mounts: the system's table of them, and second places of one. Needs no FUSE: the daemon's mount is in `fuse`.

A second place is a bind mount: the same file system with the same caches, whole or one prefix, writable or not.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
from pathlib import Path

from kvcsfs.errors import ConfigError

log = logging.getLogger(__name__)

NAME = "kvcsfs"
TYPE = "fuse.kvcsfs"
READ_AHEAD_KIB = 4096  # measured: 476 -> 862 MB/s for a sequential read, against the kernel's 128
MNT_DETACH = 2
MS_RDONLY, MS_REMOUNT, MS_BIND = 1, 32, 4096


def mounted(path: Path) -> str | None:
    """The type of what is mounted at a path, on top. Neither stat nor ismount tells the truth of a dead mount."""
    wanted = _real(path)
    found = None
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            _, place, kind, *_ = line.split(" ")
            if _unescaped(place) == wanted:
                found = kind
    return found


def _real(path: Path) -> str:
    """The path as the tables have it. Its last component is left alone: a dead mount there can't be looked at."""
    return os.path.join(os.path.realpath(path.parent), path.name)


def _unescaped(place: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), place)


def is_dead(path: Path) -> bool:
    """Whether nobody serves a mount. Source: statvfs always asks the daemon, stat may be answered from a cache."""
    try:
        os.statvfs(path)
    except OSError as exc:
        return exc.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


def clear(path: Path) -> None:
    """See that a directory is there to mount on: clear dead mounts of ours, make it if need be. Raises ConfigError."""
    while (kind := mounted(path)) is not None:
        if not (kind == TYPE and is_dead(path)):
            raise ConfigError(f"{path}: busy mount point, {kind} is mounted there; expected a free directory")
        log.info("%s: clearing the mount of a daemon that died", path)
        unmount(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"{path}: can't be a mount point: {exc.strerror}") from exc


def unmount(path: Path) -> None:
    """Detach what is mounted at a path, busy or not. Raises ConfigError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(path), MNT_DETACH) != 0:
        raise ConfigError(f"{path}: can't be unmounted: {os.strerror(ctypes.get_errno())}")


def bind(mount: Path, prefix: str, path: Path, read_only: bool) -> None:
    """Show a mount, or one prefix of it, at a second place. Raises ConfigError; then nothing is mounted there."""
    source = mount / prefix
    if prefix:
        try:
            source.mkdir(exist_ok=True)
            with contextlib.suppress(OSError):  # on a read-only mount
                os.utime(source)  # a directory that was touched stays when its last key goes
        except OSError as exc:
            raise ConfigError(f"{source}: can't be mounted at {path}: {exc.strerror}") from exc
    clear(path)
    _mount(source, path, MS_BIND)
    if read_only:  # a bind mount takes flags only in a second call, mount(2)
        try:
            _mount(source, path, MS_BIND | MS_REMOUNT | MS_RDONLY)
        except ConfigError:
            unmount(path)
            raise


def _mount(source: Path, path: Path, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(os.fsencode(source), os.fsencode(path), None, ctypes.c_ulong(flags), None) != 0:
        code = ctypes.get_errno()
        hint = ": a second place needs root" if code == errno.EPERM else ""
        raise ConfigError(f"{path}: can't be mounted: {os.strerror(code)}{hint}")


def device(path: Path) -> str:
    """The device of what is mounted at a path, as "major:minor"; asks the kernel's table, not the file system."""
    wanted = _real(path)
    found = ""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            fields = line.split(" ")
            if _unescaped(fields[4]) == wanted:
                found = fields[2]
    return found


def tune(path: Path) -> None:
    """Let the kernel read ahead in requests of full size, where we may."""
    with contextlib.suppress(OSError):
        Path(f"/sys/class/bdi/{device(path)}/read_ahead_kb").write_text(str(READ_AHEAD_KIB), encoding="ascii")
