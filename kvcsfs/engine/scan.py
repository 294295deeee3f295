"""Reads the footers of a store, folder by folder; of a large one in several processes, as the interpreter is the limit.

Run as a script it is such a process: arguments are the directory `slots`, the first folder and the step to the next;
each folder is written to stdout behind its length, as msgpack.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from kvcsfs.engine import footer
from kvcsfs.engine.entry import BLOCK, charge

FOLDERS = 256
MAX_SLOT = 1 << 63  # what a snapshot can hold
PARALLEL_ENTRIES = 50_000  # fewer are read before other processes have started
PROCESSES = 8
PIPE_BYTES = 1 << 20  # several folders: a process need not wait until the others' are taken
SAMPLE = 8  # folders that tell how many there are; slots may come to every second folder alone
_NO_FILE = frozenset({errno.EISDIR, errno.ELOOP, errno.ESPIPE, errno.ENXIO, errno.ENOENT})
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW

Row = tuple[int, str, int, bytes, int, float]  # slot, key, size, checksum, generation, created


class Folder(msgspec.Struct, array_like=True):
    """What one folder holds: `rows` of valid footers, slots of no value, and why files are left alone."""

    rows: list[Row]
    leftovers: list[int]
    complaints: list[str]


def name_of(slot: int) -> str:
    """The file name of a slot in its folder."""
    return "%x" % slot  # noqa: UP031 twice as fast as a format specification, and on the path of every put


def read_folder(slots: Path, number: int) -> Folder:
    """Read the footers of folder `number`. Names that aren't ours are passed over, and what is no plain file.

    A file with the footer of a newer format, or one that can't be read, is a complaint. Raises OSError for the folder.
    """
    found = Folder([], [], [])
    path = slots / f"{number:02x}"
    directory = os.open(path, _FLAGS | os.O_DIRECTORY)
    try:
        for name in os.listdir(directory):
            slot = _slot_of(name, number)
            if slot < 0:
                continue
            try:
                _read_slot(directory, name, slot, found)
            except (footer.NewerFormat, OSError) as exc:
                if isinstance(exc, OSError) and exc.errno in _NO_FILE:
                    continue
                reason = exc.strerror if isinstance(exc, OSError) else exc
                found.complaints.append(f"{path}/{name}: left alone: {reason}")
    finally:
        os.close(directory)
    return found


def _slot_of(name: str, folder: int) -> int:
    """The slot that a file name stands for, -1 if it isn't one of ours."""
    try:
        slot = int(name, 16)
    except ValueError:
        return -1
    ours = slot < MAX_SLOT and slot % FOLDERS == folder and name == name_of(slot)
    return slot if ours else -1


def _read_slot(directory: int, name: str, slot: int, found: Folder) -> None:
    fd = os.open(name, _FLAGS | os.O_NONBLOCK, dir_fd=directory)
    try:
        size = os.lseek(fd, 0, os.SEEK_END)  # fstat(2) builds an object of ten fields
        block = os.pread(fd, BLOCK, size - BLOCK) if size >= 2 * BLOCK else b""
    finally:
        os.close(fd)
    foot = footer.parse(block)
    if foot is not None and charge(foot.size) == size:
        found.rows.append((slot, foot.key, foot.size, foot.checksum, foot.generation, foot.created))
    else:
        found.leftovers.append(slot)


def scan(slots: Path) -> Iterator[Folder]:
    """Yield every folder, in order. Raises OSError."""
    rows = 0
    for number in range(SAMPLE):
        folder = read_folder(slots, number)
        rows += len(folder.rows)
        yield folder
    if rows * FOLDERS // SAMPLE < PARALLEL_ENTRIES:
        for number in range(SAMPLE, FOLDERS):
            yield read_folder(slots, number)
        return
    with contextlib.ExitStack() as stack:
        count = min(len(os.sched_getaffinity(0)), PROCESSES)
        pipes = [stack.enter_context(_reader(slots, SAMPLE + i, count)) for i in range(count)]
        for number in range(SAMPLE, FOLDERS):
            pipe = pipes[(number - SAMPLE) % count]
            # A process that failed is done without.
            yield (pipe and _receive(pipe)) or read_folder(slots, number)


@contextlib.contextmanager
def _reader(slots: Path, first: int, step: int) -> Iterator[IO[bytes] | None]:
    """The output of a process that reads every `step`-th folder; None if it can't be had."""
    command = [sys.executable, "-m", "kvcsfs.engine.scan", str(slots), str(first), str(step)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
    except OSError:
        yield None
        return
    with process:
        try:
            assert process.stdout is not None
            with contextlib.suppress(OSError):  # over the user's limit
                fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            yield process.stdout
        finally:
            process.kill()


def _receive(pipe: IO[bytes]) -> Folder | None:
    head = pipe.read(4)
    size = int.from_bytes(head, "little")
    block = pipe.read(size)
    return msgspec.msgpack.decode(block, type=Folder) if size and len(block) == size else None


def main(slots: str, first: str, step: str) -> None:
    """Write folders to stdout."""
    for number in range(int(first), FOLDERS, int(step)):
        block = msgspec.msgpack.encode(read_folder(Path(slots), number))
        sys.stdout.buffer.write(len(block).to_bytes(4, "little") + block)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
