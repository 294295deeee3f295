"""Reads the footers of a store, folder by folder; of a large one in several processes, as the interpreter is the limit.

`slots` is a descriptor of the directory, as its path may lead elsewhere by now. Run as a script it is such a process:
its argument is the number of that descriptor, which it inherits, its stdin a pipe that it shares with the
others and takes folders from, a byte each; what one holds goes to stdout behind its number and length, as msgpack.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import selectors
import struct
import subprocess
import sys
from collections.abc import Iterator
from typing import IO, cast

import msgspec

from kvcsfs.engine import footer
from kvcsfs.engine.entry import BLOCK, charge

FOLDERS = 256
MAX_SLOT = 1 << 63  # what a snapshot can hold
PARALLEL_ENTRIES = 50_000  # fewer are read before other processes have started
PROCESSES = 8
PIPE_BYTES = 1 << 20  # several folders: a process need not wait until the others' are taken
SAMPLE = 8  # folders that tell how many there are; slots may come to every second folder alone
_HEAD = struct.Struct("<BI")  # of what a process tells: the folder and the bytes that follow
_NO_FILE = frozenset({errno.EISDIR, errno.ELOOP, errno.ESPIPE, errno.ENXIO, errno.ENOENT})
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_SLOT_FLAGS = _FLAGS | os.O_NONBLOCK

Row = tuple[int, str, int, bytes, int, float]  # slot, key, size, checksum, generation, created


class Folder(msgspec.Struct, array_like=True):
    """What one folder holds: `rows` of valid footers, slots of no value, and why files are left alone."""

    rows: list[Row]
    leftovers: list[int]
    complaints: list[str]


def name_of(slot: int) -> str:
    """The file name of a slot in its folder."""
    return "%x" % slot  # noqa: UP031 twice as fast as a format specification, and on the path of every put


def read_folder(slots: int, number: int) -> Folder:
    """Read the footers of folder `number`. Names that aren't ours are passed over, and what is no plain file.

    A file with the footer of a newer format, or one that can't be read, is a complaint. Raises OSError for the folder.
    """
    found = Folder([], [], [])
    path = f"{number:02x}"
    directory = os.open(path, _FLAGS | os.O_DIRECTORY, dir_fd=slots)
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
    fd = os.open(name, _SLOT_FLAGS, dir_fd=directory)
    try:
        size = os.lseek(fd, 0, os.SEEK_END)  # fstat(2) builds an object of ten fields
        block = os.pread(fd, BLOCK, size - BLOCK) if size >= 2 * BLOCK else b""
    finally:
        os.close(fd)
    foot = footer.parse(block)
    if foot is not None:
        key, value_size, generation, created, checksum = foot
        if charge(value_size) == size:
            found.rows.append((slot, key, value_size, checksum, generation, created))
            return
    found.leftovers.append(slot)


def scan(slots: int) -> Iterator[Folder]:
    """Yield every folder once. Raises OSError."""
    rows = 0
    for number in range(SAMPLE):
        folder = read_folder(slots, number)
        rows += len(folder.rows)
        yield folder
    missing = set(range(SAMPLE, FOLDERS))
    if rows * FOLDERS // SAMPLE >= PARALLEL_ENTRIES:
        for number, folder in _read_apart(slots, missing.copy()):
            missing.remove(number)
            yield folder
    for number in sorted(missing):  # a process that failed is done without
        yield read_folder(slots, number)


def _read_apart(slots: int, numbers: set[int]) -> Iterator[tuple[int, Folder]]:
    """Yield folders as processes read them, each once; those that a failing process had taken don't come.

    Nobody has a share of the folders beforehand: where puts take one slot and one generation in turn, slots come to
    every second folder, and one process of two would get all the work.
    """
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        queue, end = os.pipe()
        try:
            os.write(end, bytes(sorted(numbers)))  # a pipe holds more
        finally:
            os.close(end)
        try:
            for _ in range(min(len(os.sched_getaffinity(0)), PROCESSES)):
                if pipe := stack.enter_context(_reader(slots, queue)):
                    selector.register(pipe, selectors.EVENT_READ)
        finally:
            os.close(queue)
        while numbers and selector.get_map():
            for key, _ in selector.select():
                pipe = cast("IO[bytes]", key.fileobj)
                answer = _receive(pipe)
                if answer is None:
                    selector.unregister(pipe)
                    continue
                numbers.remove(answer[0])
                yield answer


@contextlib.contextmanager
def _reader(slots: int, queue: int) -> Iterator[IO[bytes] | None]:
    """The output of a process that reads folders of the queue; None if it can't be had."""
    command = [sys.executable, "-m", "kvcsfs.engine.scan", str(slots)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        process = subprocess.Popen(
            command,
            bufsize=0,  # what lay in a buffer here, the selector wouldn't know of
            pass_fds=[slots],
            stdin=queue,
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


def _receive(pipe: IO[bytes]) -> tuple[int, Folder] | None:
    """What a process tells of one folder; None at its end."""
    head = _exactly(pipe, _HEAD.size)
    if head is None:
        return None
    number, size = _HEAD.unpack(head)
    block = _exactly(pipe, size)
    return None if block is None else (number, msgspec.msgpack.decode(block, type=Folder))


def _exactly(pipe: IO[bytes], size: int) -> bytearray | None:
    """Read `size` bytes; None if the pipe ends before."""
    block = bytearray(size)
    view, done = memoryview(block), 0
    while done < size:
        count = os.readv(pipe.fileno(), [view[done:]])
        if not count:
            return None
        done += count
    return block


def main(slots: str) -> None:
    """Write the folders whose numbers come from stdin to stdout."""
    while number := os.read(0, 1):
        block = msgspec.msgpack.encode(read_folder(int(slots), number[0]))
        sys.stdout.buffer.write(_HEAD.pack(number[0], len(block)) + block)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
