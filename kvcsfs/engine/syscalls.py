"""System calls on one file or directory, each made whole; nothing here knows of slots. Blocking."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from fcntl import F_SETLEASE, F_UNLCK, F_WRLCK, fcntl

import xxhash

from kvcsfs.errors import BackingError, CapacityError, KvcsError

SAFE = os.O_CLOEXEC | os.O_NOFOLLOW  # of every open: what is below a data directory is never a link
READ_CHUNK = 256 << 10  # hashed while it is in the processor's cache
_STATX_DIOALIGN = 0x2000
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE, fallocate(2)
_libc = ctypes.CDLL(None, use_errno=True)


def failure(exc: OSError, doing: str) -> KvcsError:
    """The error of ours that stands for an OSError of the backing file system."""
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(f"{doing}: the backing file system is full: {exc.strerror}")
    return BackingError(f"{doing}: {exc.strerror}")


def direct_alignment(directory: int, name: str) -> int:
    """The alignment in bytes that direct I/O to a file of a directory needs; 0 where its file system has none.

    Source: statx(2).
    """
    answer = ctypes.create_string_buffer(256)
    if _libc.statx(directory, os.fsencode(name), 0, _STATX_DIOALIGN, answer):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    (mask,) = struct.unpack_from("<I", answer, 0)
    memory, offset = struct.unpack_from("<II", answer, 152)  # stx_dio_mem_align, stx_dio_offset_align
    return max(memory, offset) if mask & _STATX_DIOALIGN and offset else 0


def allocate(fd: int, size: int, keep_size: bool = False) -> None:
    """Take the blocks of a file's first `size` bytes, so that writing them can't fail for lack of room.

    Makes the file as large, unless `keep_size`. Where the file system can't, the file is sparse: posix_fallocate(3)
    would write to every block instead. It costs nothing: with its extents known at once ext4 writes faster (measured).
    """
    if _libc.fallocate(fd, _KEEP_SIZE * keep_size, ctypes.c_long(0), ctypes.c_long(size)):
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(number, os.strerror(number))
        if not keep_size:
            os.ftruncate(fd, size)


def is_sole(fd: int) -> bool | None:
    """The kernel's proof that nobody else has the file of this writable descriptor open, in whatever way.

    None where the file system has no leases: nothing is proven.
    """
    if proof := take_lease(fd):
        fcntl(fd, F_SETLEASE, F_UNLCK)
    return proof


def take_lease(fd: int) -> bool | None:
    """Give the proof of `is_sole`, and keep it true: whoever opens the file now waits until the descriptor is closed.

    Source: fcntl(2), F_SETLEASE.
    """
    try:
        fcntl(fd, F_SETLEASE, F_WRLCK)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def write_all(fd: int, data: bytes, offset: int) -> None:
    """Write `data` at `offset`. Loops, as one call may write less (write(2))."""
    done = os.pwrite(fd, data, offset)
    while done < len(data):
        done += os.pwrite(fd, memoryview(data)[done:], offset + done)


def digest(fd: int, size: int) -> bytes:
    """xxh3-128 of the first `size` bytes of a file. A file that ends early has another one."""
    state = xxhash.xxh3_128()
    offset = 0
    while offset < size:
        chunk = os.pread(fd, min(READ_CHUNK, size - offset), offset)
        if not chunk:
            break
        state.update(chunk)
        offset += len(chunk)
    return state.digest()
