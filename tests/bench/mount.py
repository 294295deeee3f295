"""The mount beside bindfs, a pass-through file system in C++, over the same files in the same run.

    python tests/bench/mount.py [--entries 100000] [--rounds 5] [--base DIR]

Needs root, and bindfs and tree from the distribution. The files of bindfs and the values of the store lie on one file
system, DIR's. Rounds alternate between both, and each figure is the median of its rounds. "First": the kernel has no
pages of the mount's files, while the file system below has its own in memory.
"""

from __future__ import annotations

import argparse
import functools
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvcs import KvcsLowLevelClient, LLPutItem

MIB = 1 << 20
SMALL, LARGE = 4096, 4 * MIB
SMALL_FILES, LARGE_FILES = 1000, 16
LISTINGS = ("ls -l", "du -s", "tree", "find", "ls -f")


def main() -> None:
    """Measure, and print one JSON object: seconds by case and file system, and what part of bindfs's speed ours is."""
    parser = argparse.ArgumentParser(description="The mount beside bindfs.")
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--base", type=Path)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.base)))
        ours = stack.enter_context(kvcsfs(base, arguments.entries))
        theirs = stack.enter_context(bindfs(base, arguments.entries))
        buffer = stack.enter_context(mmap.mmap(-1, LARGE))
        found = measure({"kvcsfs": ours, "bindfs": theirs}, arguments.rounds, buffer)
    print(json.dumps({"load": os.getloadavg()[0], "entries": arguments.entries, "cases": found}, indent=1))


def contents(entries: int) -> Iterator[tuple[str, int]]:
    """Names and sizes of what both hold."""
    yield from ((f"small/{i:06}", SMALL) for i in range(SMALL_FILES))
    yield from ((f"large/{i:06}", LARGE) for i in range(LARGE_FILES))
    yield from ((f"many/{i:06}", 16) for i in range(entries))


@contextmanager
def kvcsfs(base: Path, entries: int) -> Iterator[Path]:
    """A daemon whose store is filled by its socket."""
    data, mount, socket = base / "data", base / "kvcsfs", base / "socket"
    data.mkdir()
    command = [sys.executable, "-m", "kvcsfs.cli", "serve", "--data", data, "--capacity", "4GiB"]
    with subprocess.Popen([*command, "--mount", mount, "--socket", socket], stdout=-1, text=True) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline().startswith("kvcsfs ready")
        try:
            with KvcsLowLevelClient(str(socket), default_deadline_s=600) as client:
                put_all(client, entries)
            yield mount
        finally:
            daemon.terminate()


def put_all(client: KvcsLowLevelClient, entries: int) -> None:
    """Store every value, some at once."""
    batch: list[LLPutItem] = []
    room = 0
    for name, size in contents(entries):
        batch.append(LLPutItem(name, os.urandom(size)))
        room += size
        if len(batch) == 1024 or room > 32 * MIB:
            assert all(result.status == 0 for result in client.ll_batch_put(batch))
            batch, room = [], 0
    assert all(result.status == 0 for result in client.ll_batch_put(batch))


@contextmanager
def bindfs(base: Path, entries: int) -> Iterator[Path]:
    """A directory with the same files, and bindfs over it."""
    plain, mount = base / "plain", base / "bindfs"
    mount.mkdir()
    for name in ("small", "large", "many"):
        (plain / name).mkdir(parents=True)
    for name, size in contents(entries):
        (plain / name).write_bytes(os.urandom(size))
    subprocess.run(["bindfs", plain, mount], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", mount], check=True)


def measure(places: dict[str, Path], rounds: int, buffer: mmap.mmap) -> dict[str, dict[str, float]]:
    """Run every case in turn on either, and return the medians."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        for place, path in places.items():
            forget(path)
            for case, act in cases(path, number, buffer):
                begin = time.perf_counter()
                act()
                seconds.setdefault(case, {}).setdefault(place, []).append(time.perf_counter() - begin)
    found = {}
    for case, by_place in seconds.items():
        medians = {place: statistics.median(values) for place, values in by_place.items()}
        found[case] = {**medians, "speed_of_bindfs": medians["bindfs"] / medians["kvcsfs"]}
    return found


def forget(path: Path) -> None:
    """Make the kernel drop the pages it has of a mount's files; those of the files below stay."""
    for folder in ("small", "large"):
        for name in os.listdir(path / folder):
            fd = os.open(path / folder / name, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def cases(path: Path, number: int, buffer: mmap.mmap) -> Iterator[tuple[str, Callable[[], None]]]:
    """What is measured, in its order."""
    small = [path / "small" / f"{i:06}" for i in range(SMALL_FILES)]
    large = [path / "large" / f"{i:06}" for i in range(LARGE_FILES)]
    written = [path / "large" / f"written-{number}-{i}" for i in range(LARGE_FILES)]
    for when in ("first", "again"):
        yield f"open, read 4 KiB, close: {SMALL_FILES} files, {when}", lambda: read(small, buffer, SMALL)
    for when in ("first", "again"):
        yield f"read 4 MiB: {LARGE_FILES} files, {when}", lambda: read(large, buffer, LARGE)
    yield f"write 4 MiB: {LARGE_FILES} files", lambda: write(written, buffer)
    yield f"unlink: {LARGE_FILES} files of 4 MiB", lambda: unlink(written)
    for command in LISTINGS:
        yield f"{command}: many entries", functools.partial(run, [*command.split(), path / "many"])


def read(paths: list[Path], buffer: mmap.mmap, size: int) -> None:
    """Files, each whole, in one call."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        assert os.preadv(fd, [memoryview(buffer)[:size]], 0) == size
        os.close(fd)


def write(paths: list[Path], buffer: mmap.mmap) -> None:
    """New files, each whole, in one call."""
    for path in paths:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        assert os.write(fd, buffer) == len(buffer)
        os.close(fd)


def unlink(paths: list[Path]) -> None:
    """Remove files."""
    for path in paths:
        path.unlink()


def run(command: list[str | Path]) -> None:
    """A program, its output thrown away."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
