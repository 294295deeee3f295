"""Object files of one backing directory: slots. The only module of the engine that makes file system calls.

Every method blocks and is called in a worker thread. A slot file holds one value from offset 0, padding, and its
footer as the last block; its name says nothing. It is written again for another value only under the kernel's
proof that nobody else has it open (fcntl(2), F_SETLEASE).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
import secrets
import signal
import struct
import time
from collections.abc import Iterable
from pathlib import Path

import xxhash

from kvcsfs.engine import footer
from kvcsfs.engine.entry import BLOCK, Entry
from kvcsfs.engine.faults import point
from kvcsfs.engine.scan import FOLDERS, name_of
from kvcsfs.errors import BackingError, BusyError, CapacityError, ConfigError, InvalidValueError, KvcsError

VERSION = 1
READ_CHUNK = 1 << 20
ALLOCATION_SLACK = 1 << 20  # extent blocks that a file system counts to a file, never ours to limit
_MEMORY = frozenset({"tmpfs", "ramfs"})
# Where no server is asked: FUSE and NFS flush at every close.
_LOCAL = _MEMORY | {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "zfs", "overlay"}
_AT_FDCWD = -100
_STATX_DIOALIGN = 0x2000
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE, fallocate(2)
_libc = ctypes.CDLL(None, use_errno=True)
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


def failure(exc: OSError, doing: str) -> KvcsError:
    """The error of ours that stands for an OSError of the backing file system."""
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(f"{doing}: the backing file system is full: {exc.strerror}")
    return BackingError(f"{doing}: {exc.strerror}")


class SlotStore:
    """The slots of one backing directory, locked to this process.

    With `direct` the descriptors for clients bypass the page cache; `align` is what they then need, in bytes, of
    addresses, offsets and sizes (0: nothing). Footers always go through the cache. With `durable` the jobs make
    what they acknowledge survive a power loss.

    Raises ConfigError when the directory can't be a store: not writable, a newer format, held by another daemon.
    """

    def __init__(self, path: Path, direct: bool = False, durable: bool = False) -> None:
        # A lease that another process breaks in the moment we hold it would kill the daemon with SIGIO.
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        self.path = path
        self.durable = durable
        self._lock = self._claim()
        try:
            for name in ("slots", "epoch", *(f"slots/{i:02x}" for i in range(FOLDERS))):
                _own_directory(path / name)
            sync_directory(path / "slots")
            sync_directory(path)
            self._slots = os.open(path / "slots", os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
            self.root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self.previous_epoch, self.previous_boot, self.epoch = self._begin_epoch()
            self.align = direct_alignment(path / "VERSION") if direct else 0
        except OSError as exc:
            os.close(self._lock)
            raise ConfigError(f"{path}: can't be used as a data directory: {exc.strerror}") from exc
        except ConfigError:
            os.close(self._lock)
            raise
        if direct and not self.align:
            os.close(self._lock)
            raise ConfigError(f'{path}: the file system has no direct I/O, expected io = "buffered"')
        self._client_flags = os.O_DIRECT if direct else 0
        kind = self._file_system()
        self.in_memory = kind in _MEMORY
        self.is_local = kind in _LOCAL  # no network and no other process behind it
        self._numbers = itertools.count((self.epoch << 40) + 1)

    def close(self) -> None:
        """Give the directory up."""
        os.close(self.root)
        os.close(self._slots)
        os.close(self._lock)

    # -- start

    def _claim(self) -> int:
        name = self.path / "VERSION"
        try:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
        except OSError as exc:
            raise ConfigError(f"{self.path}: can't be used as a data directory: {exc.strerror}") from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            text = os.pread(fd, 4096, 0).decode(errors="replace").split()
            if not text:
                self.store_id = secrets.token_hex(8)
                os.pwrite(fd, f"kvcsfs {VERSION} {self.store_id}\n".encode(), 0)
                os.fsync(fd)
            elif len(text) != 3 or text[0] != "kvcsfs" or not text[1].isdigit():
                raise ConfigError(f"{name}: not a kvcsfs data directory; give an empty directory")
            elif int(text[1]) > VERSION:
                raise ConfigError(
                    f"{name}: format {text[1]}, this version reads up to {VERSION}; use a newer kvcsfs"
                )
            else:
                self.store_id = text[2]
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(f"{self.path}: in use by another kvcsfs daemon") from None
        except OSError as exc:
            os.close(fd)
            raise ConfigError(f"{self.path}: can't be used as a data directory: {exc.strerror}") from exc
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
        fd = os.open(folder / str(previous + 1), os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
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

    def _file_system(self) -> str:
        """The type of the file system, from the mount table, as statvfs doesn't tell."""
        device = os.stat(self.path).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table:
            for line in table:
                left, _, right = line.partition(" - ")
                if left.split()[2] == wanted:
                    return right.split()[0]
        return ""

    def probe(self) -> None:
        """Ask the file system for something small that it can't answer from a cache; an error is an answer."""
        try:
            os.close(os.open("probe", os.O_WRONLY | os.O_CREAT | _FLAGS, 0o600, dir_fd=self._slots))
            os.unlink("probe", dir_fd=self._slots)
        except OSError:
            pass

    def resume_after(self, generation: int) -> None:
        """Give no number up to `generation`: the directory `epoch` may be older than the slots, or have been lost."""
        if generation >> 40 >= self.epoch:
            self._numbers = itertools.count(generation + 1)

    def number(self) -> int:
        """A number that was never given before, in this life or an earlier one: slot ids and generations."""
        return next(self._numbers)

    # -- one object

    def _path(self, slot: int) -> str:
        return f"{slot % FOLDERS:02x}/{name_of(slot)}"

    def open_read(self, slot: int) -> int:
        """A read-only descriptor of a slot for a client."""
        return self._open(slot, os.O_RDONLY | self._client_flags)

    def open_write(self, slot: int) -> int:
        """A write-only descriptor of a slot for a client."""
        return self._open(slot, os.O_WRONLY | self._client_flags)

    def open_own(self, slot: int) -> int:
        """A descriptor of a slot that the daemon itself reads and writes, through the cache."""
        return self._open(slot, os.O_RDWR)

    def _open(self, slot: int, flags: int) -> int:
        return os.open(self._path(slot), flags | _FLAGS, dir_fd=self._slots)

    def create(self, slot: int, size: int) -> int:
        """Make a slot file of `size` bytes and return a write-only descriptor for a client."""
        return self._create(slot, size, os.O_WRONLY | self._client_flags)

    def create_own(self, slot: int) -> int:
        """Make an empty slot file that the daemon itself reads and writes."""
        return self._create(slot, 0, os.O_RDWR)

    def _create(self, slot: int, size: int, flags: int) -> int:
        fd = os.open(self._path(slot), flags | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=self._slots)
        point("slot.made")
        try:
            if size:
                allocate(fd, size)
        except OSError:
            os.close(fd)
            self.unlink(slot)
            raise
        point("slot.sized")
        return fd

    def unlink(self, slot: int) -> None:
        """Remove a slot file; one that is gone already is fine."""
        try:
            os.unlink(self._path(slot), dir_fd=self._slots)
        except FileNotFoundError:
            pass

    def void(self, entry: Entry) -> None:
        """Overwrite the footer of an entry, so that recovery finds nothing. A file that is gone is fine."""
        try:
            fd = self._open(entry.slot, os.O_WRONLY)
        except FileNotFoundError:
            return
        try:
            write_all(fd, footer.VOID, entry.charged - BLOCK)
        finally:
            os.close(fd)

    def recycle(self, slot: int, size: int) -> int | None:
        """Void a slot of `size` bytes and return its only descriptor, write-only; None if somebody else has it open.

        A slot that can't be had is unlinked: its bytes go when the last descriptor does.
        """
        try:
            fd = self._open(slot, os.O_WRONLY)
        except FileNotFoundError:
            return None
        try:
            if os.fstat(fd).st_size == size and is_sole(fd, without_leases=False):
                point("slot.taken")
                write_all(fd, footer.VOID, size - BLOCK)
                point("slot.voided")
                if self._client_flags:
                    fcntl.fcntl(fd, fcntl.F_SETFL, self._client_flags)
                return fd
        except OSError:
            os.close(fd)
            raise
        os.close(fd)
        self.unlink(slot)
        return None

    def seal(self, entry: Entry) -> None:
        """Write the footer of a staged object: the commit.

        Raises:
            BusyError: somebody still has the file open. InvalidValueError: its size isn't what was reserved.
        """
        size = entry.charged
        fd = self._open(entry.slot, os.O_RDWR)
        try:
            stat = os.fstat(fd)
            if stat.st_size != size or stat.st_blocks * 512 > size + ALLOCATION_SLACK:
                raise InvalidValueError(
                    f"{entry.key!r}: the object has {stat.st_size} B, {size} B were reserved"
                )
            if not is_sole(fd, without_leases=True):
                raise BusyError(f"{entry.key!r}: somebody still has the new object open")
            write_all(fd, footer.of(entry), size - BLOCK)
        finally:
            os.close(fd)

    def write_footer(self, entry: Entry) -> None:
        """Write the footer of an entry in place."""
        fd = self._open(entry.slot, os.O_WRONLY)
        try:
            write_all(fd, footer.of(entry), entry.charged - BLOCK)
        finally:
            os.close(fd)

    def sync(self, slot: int) -> None:
        """Make a slot durable: data and footer."""
        fd = self._open(slot, os.O_WRONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_names(self, slots: Iterable[int]) -> None:
        """Make the names of slots durable."""
        for folder in {slot % FOLDERS for slot in slots}:
            fd = os.open(f"{folder:02x}", os.O_RDONLY | os.O_DIRECTORY | _FLAGS, dir_fd=self._slots)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def is_there(self) -> bool:
        """Whether the path still leads to the directory that was opened: it may be unmounted or replaced."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.root))
        except OSError:
            return False

    def try_write(self) -> None:
        """Write a file and remove it. Raises the OSError that any other write would get."""
        fd = os.open("probe", os.O_WRONLY | os.O_CREAT | _FLAGS, 0o600, dir_fd=self.root)
        try:
            write_all(fd, footer.VOID, 0)
            os.fsync(fd)
        finally:
            os.close(fd)
            os.unlink("probe", dir_fd=self.root)

    def verify(self, entry: Entry) -> bool:
        """Read a whole value and compare its checksum."""
        fd = self._open(entry.slot, os.O_RDONLY)
        try:
            return digest(fd, entry.size) == entry.checksum
        finally:
            os.close(fd)


def _own_directory(path: Path) -> None:
    """Make a directory that is private to us. Raises ConfigError for a symbolic link, which is never followed."""
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink():
        raise ConfigError(f"{path}: a symbolic link, expected a directory")


def direct_alignment(path: Path) -> int:
    """The alignment in bytes that direct I/O to a file needs; 0 where its file system has none. Source: statx(2)."""
    answer = ctypes.create_string_buffer(256)
    if _libc.statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_DIOALIGN, answer):
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


def boot_id() -> str:
    """The id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def sync_directory(path: Path) -> None:
    """fsync a directory, so that the names in it are on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_sole(fd: int, without_leases: bool) -> bool:
    """The kernel's proof that nobody else has the file of this writable descriptor open, in whatever way.

    `without_leases` is the answer where the file system has none. Source: fcntl(2), F_SETLEASE.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return False
    except OSError:
        return without_leases
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


def now() -> float:
    """Seconds since the epoch."""
    return time.time()
