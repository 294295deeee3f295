"""Object files of one backing directory: slots.

Every method blocks and is called in a worker thread. A slot file holds one value from offset 0, padding, and its
footer as the last block; its name says nothing. It is written again for another value only under the kernel's
proof that nobody else has it open (fcntl(2), F_SETLEASE).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from kvcsfs.engine import footer
from kvcsfs.engine.directory import Directory, unusable
from kvcsfs.engine.entry import BLOCK, SOLE, Entry
from kvcsfs.engine.faults import point
from kvcsfs.engine.scan import FOLDERS, name_of
from kvcsfs.engine.syscalls import SAFE, allocate, digest, direct_alignment, is_sole, take_lease, write_all
from kvcsfs.errors import BusyError, ConfigError, InvalidValueError

_FOLDERS = [f"{i:02x}" for i in range(FOLDERS)]
ALLOCATION_SLACK = 1 << 20  # extent blocks that a file system counts to a file, never ours to limit
_MEMORY = frozenset({"tmpfs", "ramfs"})
# Where no server is asked: FUSE and NFS flush at every close.
_LOCAL = _MEMORY | {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "zfs", "overlay"}


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
        self.durable = durable
        self._client_flags = os.O_DIRECT if direct else 0
        self._use(Directory(path))

    def _use(self, directory: Directory) -> None:
        """Serve what is in a directory. Raises ConfigError, and it is closed."""
        path, root, direct = directory.path, directory.root, bool(self._client_flags)
        try:
            with contextlib.ExitStack() as opened:
                opened.callback(directory.close)
                slots = os.open("slots", os.O_RDONLY | os.O_DIRECTORY | SAFE, dir_fd=root)
                opened.callback(os.close, slots)
                align = direct_alignment(root, "VERSION") if direct else 0
                if direct and not align:
                    raise ConfigError(f'{path}: the file system has no direct I/O, expected io = "buffered"')
                kind = directory.file_system()
                opened.pop_all()
        except OSError as exc:
            raise unusable(path, exc) from exc
        self.align = align
        self.in_memory = kind in _MEMORY
        self.is_local = kind in _LOCAL  # no network and no other process behind it
        self.directory, self.slots = directory, slots

    @property
    def given_up(self) -> bool:
        """Whether it has no directory: between `give_up` and `take_up`, where every call on a file fails (EBADF)."""
        return self.slots < 0

    def give_up(self) -> list[int]:
        """Let the directory go; returns its descriptors, to be closed."""
        fds = [fd for fd in (self.slots, *self.directory.give_up()) if fd >= 0]
        self.slots = -1
        return fds

    def take_up(self) -> None:
        """Have the directory again that was given up. Raises ConfigError unless the same store is at its path."""
        self._use(Directory(self.directory.path, self.directory.store_id))

    def close(self) -> None:
        """Give the directory up, if it has one."""
        for fd in self.give_up():
            os.close(fd)

    def probe(self) -> None:
        """Ask the file system for something small that it can't answer from a cache; an error is an answer."""
        try:
            os.close(os.open("probe", os.O_WRONLY | os.O_CREAT | SAFE, 0o600, dir_fd=self.slots))
            os.unlink("probe", dir_fd=self.slots)
        except OSError:
            pass

    # -- one object

    def _path(self, slot: int) -> str:
        return f"{_FOLDERS[slot % FOLDERS]}/{name_of(slot)}"

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
        return os.open(self._path(slot), flags | SAFE, dir_fd=self.slots)

    def create(self, slot: int, size: int) -> int:
        """Make a slot file of `size` bytes and return a write-only descriptor for a client."""
        return self._create(slot, size, os.O_WRONLY | self._client_flags)

    def create_own(self, slot: int) -> int:
        """Make an empty slot file that the daemon itself reads and writes."""
        return self._create(slot, 0, os.O_RDWR)

    def _create(self, slot: int, size: int, flags: int) -> int:
        fd = os.open(self._path(slot), flags | os.O_CREAT | os.O_EXCL | SAFE, 0o600, dir_fd=self.slots)
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
            os.unlink(self._path(slot), dir_fd=self.slots)
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

    def recycle(self, slot: int, size: int, sole: bool = False) -> int | None:
        """Void a slot of `size` bytes and return its only descriptor, write-only; None if somebody else has it open.

        A slot that can't be had is unlinked: its bytes go when the last descriptor does. `sole`: the proof was given
        at the commit, and no descriptor was given out since.
        """
        try:
            fd = self._open(slot, os.O_WRONLY)
        except FileNotFoundError:
            return None
        try:
            if sole or (os.fstat(fd).st_size == size and is_sole(fd)):
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
            proof = take_lease(fd)  # it ends with the descriptor
            if proof is False:
                raise BusyError(f"{entry.key!r}: somebody still has the new object open")
            write_all(fd, footer.of(entry), size - BLOCK)
            if proof:
                entry.flags |= SOLE
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
            fd = os.open(f"{folder:02x}", os.O_RDONLY | os.O_DIRECTORY | SAFE, dir_fd=self.slots)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def verify(self, entry: Entry) -> bool:
        """Read a whole value and compare its checksum."""
        fd = self._open(entry.slot, os.O_RDONLY)
        try:
            return digest(fd, entry.size) == entry.checksum
        finally:
            os.close(fd)
