"""Everything at once on a mount whose store is too small for it. `KVCSFS_STRESS_SECONDS` says how long.

No program sees an error but those that an eviction, or another program, explains; no byte is wrong; the books hold
all along, and in the end agree with what is on disk.
"""

import errno
import hashlib
import io
import itertools
import multiprocessing
import os
import random
import subprocess
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.faces.mounted import Mounted, eventually
from tests.needs import needs_fuse
from tests.stores import bytes_on_disk

pytestmark = [
    pytest.mark.mount,
    needs_fuse,
]
SECONDS = float(os.environ.get("KVCSFS_STRESS_SECONDS", "8"))
CAPACITY = 24 << 20
THREADS = 4
EXPLAINED = {
    errno.ENOENT,
    errno.EEXIST,
    errno.ENOTEMPTY,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EXDEV,
    errno.ENOSPC,
    errno.EINVAL,  # a directory into itself
    errno.ESTALE,  # replaced twice while it was being opened
}
Content = dict[str, bytes]


def publish(folder: Path, dice: random.Random) -> None:
    """Write a page as engines do, or read one of anybody: it is whole, or not there."""
    path = folder / f"p{dice.randrange(40)}"
    if dice.random() < 0.4:
        body = dice.randbytes(dice.choice([10, 5000, 300_000, 1_500_000]))
        temporary = folder / f"{path.name}.{dice.getrandbits(32):08x}.tmp"
        temporary.write_bytes(hashlib.sha256(body).digest() + body)
        temporary.rename(path)
    else:
        data = path.read_bytes()
        assert hashlib.sha256(data[32:]).digest() == data[:32], path


def places(folder: Path) -> tuple[list[Path], list[Path]]:
    """The directories and the files that `change` and `look` know."""
    directories = [folder / d for d in ("d0", "d1", "d0/d2", "d0/d3", "d1/d2", "d0/d2/d4")]
    return directories, [d / f"f{i}" for d in [folder, *directories] for i in range(4)]


def change(folder: Path, dice: random.Random) -> None:
    """Change something, in one of the ways that there are."""
    directories, files = places(folder)
    file, other, directory = dice.choice(files), dice.choice(files), dice.choice(directories)
    size = dice.choice([0, 10, 5000, 300_000])

    def overwrite() -> None:
        with open(file, "r+b", buffering=0) as out:
            out.seek(dice.randrange(size + 1))
            out.write(bytes(5000))
            out.truncate(size)
            os.fsync(out)

    ways: list[Callable[[], object]] = [
        lambda: file.write_bytes(bytes(size)),
        overwrite,
        lambda: os.truncate(file, size),
        lambda: file.rename(other),
        file.unlink,
        directory.mkdir,
        directory.rmdir,
        lambda: directory.rename(dice.choice(directories)),
    ]
    dice.choice(ways)()


def look(folder: Path, dice: random.Random) -> None:
    """List a directory, each name once, and read a file."""
    directories, files = places(folder)
    names = [entry.name for entry in os.scandir(dice.choice([folder, *directories]))]
    assert len(names) == len(set(names))
    dice.choice(files).read_bytes()


def repeat(act: Callable[[Path, random.Random], None], folder: Path, seed: int, end: float) -> None:
    """Do things at random until the end."""
    dice = random.Random(seed)
    while time.monotonic() < end:
        try:
            act(folder, dice)
        except OSError as exc:
            if exc.errno not in EXPLAINED:
                raise


def unpack(folder: Path, tarball: Path, content: Content, end: float) -> None:
    """`tar x` and `rm -rf` in turn. Neither says a word, and what is there in between is right."""
    while time.monotonic() < end:
        folder.mkdir()
        for command in (["tar", "-xf", tarball, "-C", folder], ["rm", "-rf", folder]):
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            assert (ran.returncode, ran.stderr) == (0, "")
            for name, body in content.items() if command[0] == "tar" else ():
                try:
                    assert (folder / name).read_bytes() == body, name
                except FileNotFoundError:
                    continue
        assert not folder.exists()


def together(act: Callable[..., None], *columns: object) -> None:
    """Do something in several threads; what one raises is raised."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(act, *columns))


def make_tarball(path: Path) -> Content:
    """Some hundred files of 1 KiB to 512 KiB in directories; the large ones are few."""
    dice = random.Random(1)
    content: Content = {}
    with tarfile.open(path, "w") as tar:
        for directory in ("d", "d/e", "d/f", "d/f/g"):
            info = tarfile.TarInfo(directory)
            info.type, info.mode = tarfile.DIRTYPE, 0o750
            tar.addfile(info)
            for i in range(40):
                info = tarfile.TarInfo(f"{directory}/{i}")
                body = content[info.name] = dice.randbytes(1024 << int(10 * dice.random() ** 3))
                info.size, info.mtime = len(body), 1_700_000_000
                tar.addfile(info, io.BytesIO(body))
    return content


def listed(folder: Path) -> set[Path]:
    """The files below a directory as the daemon lists them."""
    return {Path(root) / name for root, _, names in os.walk(folder) for name in names}


def test_everything_at_once(tmp_path):
    content = make_tarball(tmp_path / "tarball")
    with Mounted(tmp_path / "data", tmp_path / "mnt", capacity=CAPACITY) as store:
        pages, tree = store.path / "pages", store.path / "tree"
        for folder in (pages, tree):
            folder.mkdir()
        end = time.monotonic() + SECONDS
        fixed = [itertools.repeat(x, THREADS) for x in (tmp_path / "tarball", content, end)]
        loads = [(unpack, [store.path / f"tar{i}" for i in range(THREADS)], *fixed)]
        for i, (act, folder) in enumerate(((publish, pages), (change, tree), (look, tree))):
            seeds = range(i * THREADS, (i + 1) * THREADS)
            loads.append((repeat, [act] * THREADS, [folder] * THREADS, seeds, [end] * THREADS))
        context = multiprocessing.get_context("fork")
        workers = [context.Process(target=together, args=load) for load in loads]
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            store.call("check")
            store.put("pages/put", b"x" * 100_000)
            store.put("tree/d0/f0", b"x" * 5000)
            store.evict("tree/d0/")
            time.sleep(0.1)
        for worker in workers:
            worker.join()
        assert [worker.exitcode for worker in workers] == [0] * len(workers)
        # The kernel answers stat by what it remembers, and listings by what the daemon says.
        eventually(lambda: {path for path in places(tree)[1] if path.exists()} == listed(tree))

        def figures() -> Any:
            return store.call("status")["mountpoints"][0]

        eventually(lambda: figures()["reserved_bytes"] == figures()["retired_bytes"] == 0)
        assert figures()["used_bytes"] == bytes_on_disk(tmp_path / "data" / "0") <= CAPACITY
        assert figures()["evictions"] > 100
        store.call("check")
        assert store.stop() == ""
