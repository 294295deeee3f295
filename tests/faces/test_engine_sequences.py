"""What inference engines' own file backends do to a directory, call by call, without the engines.

Read off SGLang 0.5.23, LMCache 0.5.6, vLLM 0.33.0, safetensors 0.8.0, llm-d's backend, NIXL, Dynamo and Mooncake with
strace. Each must get back what it put, or a clean miss, also while values are evicted below it.
"""

import ctypes
import dataclasses
import errno
import fcntl
import hashlib
import itertools
import mmap
import os
import random
import signal
import subprocess
import sys
import termios
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faces.mounted import Mounted
from tests.needs import needs_fuse

pytestmark = [
    pytest.mark.mount,
    needs_fuse,
]
MIB = 1 << 20
FALLOC = ctypes.CDLL(None, use_errno=True).fallocate
numbers = itertools.count(1000)


def aligned(value: bytes) -> mmap.mmap:
    """A copy in memory that O_DIRECT takes."""
    buffer = mmap.mmap(-1, len(value))
    buffer[:] = value
    return buffer


def is_there(path: Path) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def opened(path: Path, flags: int) -> int | None:
    """A descriptor; None for a miss. Any other error is one."""
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


# -- SGLang


def sglang_set(folder: Path, key: str, value: bytes) -> None:
    """HiCacheFile: numpy's tofile writes through a duplicated descriptor, so that two are closed."""
    final = folder / f"{key}_model_0_1.bin"
    if is_there(final):
        return
    temporary = folder / f".{uuid.uuid4().hex}.tmp"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    os.fstat(fd)
    with pytest.raises(OSError, check=lambda exc: exc.errno in (errno.ENOTTY, errno.EINVAL)):
        fcntl.ioctl(fd, termios.TCGETS, bytes(64))
    os.lseek(fd, 0, os.SEEK_CUR)
    duplicate = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
    assert os.write(duplicate, value) == len(value)
    os.close(duplicate)
    os.lseek(fd, 0, os.SEEK_CUR)
    os.close(fd)
    os.rename(temporary, final)


def sglang_get(folder: Path, key: str) -> bytes | None:
    fd = opened(folder / f"{key}_model_0_1.bin", os.O_RDONLY)
    if fd is None:
        return None
    size = os.fstat(fd).st_size
    value = os.read(fd, size)
    os.close(fd)
    assert len(value) == size
    return value


def nixl_set(folder: Path, key: str, value: bytes) -> None:
    """HiCacheNixl: keys and values are two files in a bucket, each written in place under its final name."""
    bucket = folder / key[:2]
    bucket.mkdir(exist_ok=True)
    half = len(value) // 2 & -4096
    for suffix, part in (("_k", value[:half]), ("_v", value[half:])):
        fd = os.open(bucket / (key + suffix), os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o644)
        assert os.pwritev(fd, [aligned(part)], 0) == len(part)
        os.close(fd)


def nixl_get(folder: Path, key: str) -> bytes | None:
    parts = []
    for suffix in ("_k", "_v"):
        fd = opened(folder / key[:2] / (key + suffix), os.O_RDWR | os.O_DIRECT)
        if fd is None:
            return None
        buffer = mmap.mmap(-1, os.fstat(fd).st_size)
        assert os.preadv(fd, [buffer], 0) == len(buffer)
        os.close(fd)
        parts.append(buffer[:])
    return b"".join(parts)


# -- LMCache


def local_disk_set(folder: Path, key: str, value: bytes) -> None:
    """LocalDiskBackend: in place."""
    os.statvfs(folder)
    fd = os.open(folder / f"model@1@0@{key}@half.pt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.fstat(fd)
    assert os.write(fd, value) == len(value)
    os.close(fd)


def local_disk_get(folder: Path, key: str) -> bytes | None:
    fd = opened(folder / f"model@1@0@{key}@half.pt", os.O_RDONLY)
    if fd is None:
        return None
    with open(fd, "rb") as file:
        return file.read()


def fs_set(folder: Path, key: str, value: bytes) -> None:
    """FSConnector: a temporary directory, a small header first."""
    temporary = folder / "tmp" / f"{key}.data"
    temporary.parent.mkdir(exist_ok=True)
    with open(temporary, "wb") as file:
        file.write(value[:28])
        file.write(value[28:])
    os.rename(temporary, folder / f"{key}.data")


def fs_get(folder: Path, key: str) -> bytes | None:
    path = folder / f"{key}.data"
    if not (is_there(path) and is_there(path)):
        return None
    try:
        with open(path, "rb") as file:
            return file.read(28) + file.read()
    except FileNotFoundError:
        return None


def gds_set(folder: Path, key: str, value: bytes) -> None:
    """GdsBackend without a GPU: a header, then a shared map of the rest; a file beside it for the metadata."""
    final = folder / key[:2] / key[2:4] / key
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f"{key}.tmp{uuid.uuid4().hex[:8]}")
    temporary.write_bytes(value[:4096])
    fd = os.open(temporary, os.O_RDWR)
    os.ftruncate(fd, len(value))
    with mmap.mmap(fd, len(value), flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE) as area:
        area[4096:] = value[4096:]
    os.close(fd)
    os.rename(temporary, final)
    side = final.with_name(f"{key}.metadata.tmp")
    side.write_bytes(b"%d" % len(value))
    os.rename(side, final.with_name(f"{key}.metadata"))


def gds_get(folder: Path, key: str) -> bytes | None:
    path = folder / key[:2] / key[2:4] / key
    for flags in (os.O_RDONLY | os.O_NOATIME, os.O_RDONLY):
        try:
            fd = opened(path, flags)
            break
        except PermissionError:
            continue
    return None if fd is None else mapped(fd)


def mapped(fd: int) -> bytes:
    """A whole file through a private map."""
    size = os.fstat(fd).st_size
    flags = mmap.MAP_PRIVATE | mmap.MAP_POPULATE
    with mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE) as area:
        os.close(fd)
        return area[:]


# -- vLLM, and what builds on it


def vllm_set(folder: Path, key: str, value: bytes) -> None:
    """FileSystemTierManager: two levels of directories, O_DIRECT, all in one write."""
    final = folder / key[:3] / f"{key[3:5]}_g0" / f"{key}.bin"
    if is_there(final):
        return
    os.makedirs(final.parent, exist_ok=True)
    temporary = final.with_name(f"{key}.bin_{next(numbers)}.tmp")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT
    fd = os.open(temporary, flags, 0o644)
    try:
        assert os.write(fd, aligned(value)) == len(value)
    except OSError:
        os.unlink(temporary)
        raise
    finally:
        os.close(fd)
    os.rename(temporary, final)


def vllm_get(folder: Path, key: str) -> bytes | None:
    path = folder / key[:3] / f"{key[3:5]}_g0" / f"{key}.bin"
    if not os.access(path, os.F_OK):
        return None
    fd = opened(path, os.O_RDONLY | os.O_DIRECT)
    if fd is None:
        return None
    buffer = mmap.mmap(-1, os.fstat(fd).st_size)
    assert os.readv(fd, [buffer]) == len(buffer)
    os.close(fd)
    return buffer[:]


def llm_d_set(folder: Path, key: str, value: bytes) -> None:
    """llm-d's backend: a stream of a mebibyte at a time."""
    temporary, final = folder / f"{key}_{next(numbers)}.tmp", folder / key
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for start in range(0, len(value), MIB):
        part = value[start : start + MIB]
        assert os.write(fd, part) == len(part)
    os.close(fd)
    os.rename(temporary, final)


def llm_d_get(folder: Path, key: str) -> bytes | None:
    """Read from the tail; the hit is noted as an access time."""
    fd = opened(folder / key, os.O_RDONLY)
    if fd is None:
        return None
    size = os.lseek(fd, 0, os.SEEK_END)
    middle = size // 2
    os.lseek(fd, middle, os.SEEK_SET)
    tail = os.read(fd, size)
    value = os.pread(fd, middle, 0) + tail
    os.close(fd)
    try:
        os.utime(folder / key, ns=(time.time_ns(), (folder / key).stat().st_mtime_ns))
    except FileNotFoundError:
        pass
    return value


def safetensors_set(folder: Path, key: str, value: bytes) -> None:
    """safetensors 0.8 (vLLM's ExampleConnector): sized first, then two writes."""
    (folder / key).mkdir(exist_ok=True)
    temporary, final = folder / key / f".tmp{next(numbers)}.tmp", folder / key / "layer_0.safetensors"
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    os.ftruncate(fd, len(value))
    assert os.write(fd, value[:100]) == 100
    assert os.write(fd, value[100:]) == len(value) - 100
    os.close(fd)
    os.rename(temporary, final)


def safetensors_get(folder: Path, key: str) -> bytes | None:
    path = folder / key / "layer_0.safetensors"
    fds = [opened(path, os.O_RDONLY), opened(path, os.O_RDONLY)]
    if None in fds:
        for fd in fds:
            if fd is not None:
                os.close(fd)
        return None
    header, body = (fd for fd in fds if fd is not None)
    os.posix_fadvise(body, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    first = mapped(header)
    value = mapped(body)
    # Between the two it may have been evicted and put anew; either is whole.
    assert len(first) == len(value)
    return value


# -- Mooncake


def mooncake_set(folder: Path, key: str, value: bytes) -> None:
    """The storage backend of Mooncake Store: statfs each time, in place."""
    path = folder / key[0] / key[1] / key
    path.parent.mkdir(parents=True, exist_ok=True)
    os.statvfs(folder)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    assert os.pwritev(fd, [value[:5000], value[5000:]], 0) == len(value)
    os.close(fd)


def mooncake_get(folder: Path, key: str) -> bytes | None:
    fd = opened(folder / key[0] / key[1] / key, os.O_RDONLY)
    if fd is None:
        return None
    first, rest = bytearray(5000), bytearray(os.fstat(fd).st_size - 5000)
    assert os.preadv(fd, [first, rest], 0) == len(first) + len(rest)
    os.close(fd)
    return bytes(first + rest)


@dataclasses.dataclass(frozen=True)
class Backend:
    """How one puts and gets. `in_place`: it writes under the final name, so only its own memory says what is whole."""

    put: Callable[[Path, str, bytes], None]
    get: Callable[[Path, str], bytes | None]
    in_place: bool = False


BACKENDS = {
    "sglang": Backend(sglang_set, sglang_get),
    "sglang-nixl": Backend(nixl_set, nixl_get, in_place=True),
    "lmcache-local-disk": Backend(local_disk_set, local_disk_get, in_place=True),
    "lmcache-fs": Backend(fs_set, fs_get),
    "lmcache-gds": Backend(gds_set, gds_get),
    "vllm": Backend(vllm_set, vllm_get),
    "llm-d": Backend(llm_d_set, llm_d_get),
    "safetensors": Backend(safetensors_set, safetensors_get),
    "mooncake": Backend(mooncake_set, mooncake_get, in_place=True),
}


def value_of(key: str) -> bytes:
    """A value that follows from its key: 64 KiB to 1 MiB in whole blocks, as direct I/O needs them."""
    seed = hashlib.sha256(key.encode()).digest()
    return random.Random(seed).randbytes((16 + seed[0] % 241) * 4096)


def key_of(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Iterator[Mounted]:
    base = tmp_path_factory.mktemp("sequences")
    with Mounted(base / "data", base / "mnt") as mounted:
        yield mounted
        mounted.call("check")
        assert mounted.stop() == ""


@pytest.mark.parametrize("name", BACKENDS)
def test_what_was_put_comes_back_and_what_was_evicted_is_a_clean_miss(store, name):
    backend, folder = BACKENDS[name], store.path / "tenant" / name
    folder.mkdir(parents=True)
    keys = [key_of(i) for i in range(4)]
    assert [backend.get(folder, key) for key in keys] == [None] * 4
    for key in keys:
        backend.put(folder, key, value_of(key))
    assert [backend.get(folder, key) for key in keys] == [value_of(key) for key in keys]
    # A client of the socket sees the same values, and none of the temporary names.
    seen = [f for f in folder.rglob("*") if f.is_file()]
    assert not [f for f in seen if ".tmp" in f.name]
    stored = {store.get(str(f.relative_to(store.path))) for f in seen}
    assert name == "sglang-nixl" or stored >= {value_of(key) for key in keys}
    while store.call("status")["mountpoints"][0]["entries"]:  # what was read is let go a moment later
        store.evict()
    assert [backend.get(folder, key) for key in keys] == [None] * 4
    for key in keys:
        backend.put(folder, key, value_of(key))
    assert [backend.get(folder, key) for key in keys] == [value_of(key) for key in keys]
    store.evict()


class Hammer:
    """Puts and gets of one backend in a folder. What it knows to be there must be whole, or a clean miss."""

    def __init__(self, name: str, folder: Path, seed: int) -> None:
        self.backend, self.folder = BACKENDS[name], folder
        self.rng = random.Random(seed)
        self.done: set[str] = set()
        self.hits = 0
        self.wrong: list[str] = []
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        for _ in range(30):
            key = key_of(self.rng.randrange(8))
            try:
                self.put_or_get(key)
            except OSError as exc:
                # No room is a put that failed; a file may go between the calls of one put.
                if exc.errno not in (errno.ENOSPC, errno.ENOENT):
                    self.wrong.append(f"{self.folder.name}: {exc!r}")
            except AssertionError as exc:
                self.wrong.append(f"{self.folder.name}: {exc!r}")

    def put_or_get(self, key: str) -> None:
        whole = not self.backend.in_place or key in self.done
        if self.rng.random() < 0.5 and not (self.backend.in_place and whole):
            self.backend.put(self.folder, key, value_of(key))
            self.done.add(key)
        elif whole:
            value = self.backend.get(self.folder, key)
            assert value in (None, value_of(key)), f"a wrong value of {key}"
            self.hits += value is not None
            if value is None:
                self.done.discard(key)


def test_all_of_them_at_once_while_values_are_evicted_below(tmp_path):
    with Mounted(tmp_path / "data", tmp_path / "mnt", capacity=16 * MIB) as store:
        hammers = []
        for i, (name, backend) in enumerate(BACKENDS.items()):
            folder = store.path / name
            folder.mkdir()
            for j in range(1 if backend.in_place else 2):  # in place, each needs a place of its own
                hammers.append(Hammer(name, folder, 10 * i + j))
        for hammer in hammers:
            hammer.thread.start()
        while any(hammer.thread.is_alive() for hammer in hammers):
            store.evict(random.choice(list(BACKENDS)) + "/")
            store.call("check")
        assert [wrong for hammer in hammers for wrong in hammer.wrong] == []
        assert sum(hammer.hits for hammer in hammers) > 20
        assert store.call("status")["mountpoints"][0]["evictions"] > 50
        store.call("check")
        assert store.stop() == ""


def test_vllms_probe_for_direct_io(store):
    path = store.path / f".o_direct_probe_{uuid.uuid4().hex}.tmp"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT, 0o644)
    assert os.write(fd, aligned(bytes(4096))) == 4096
    os.close(fd)
    os.unlink(path)


def test_a_tree_of_many_small_directories(store):
    root = store.path / "vllm" / "model_0123456789ab_r0"
    for i in range(60):
        key = key_of(i)
        os.makedirs(root / key[:3] / f"{key[3:5]}_g0", exist_ok=True)
        with pytest.raises(FileExistsError):
            os.mkdir(root / key[:3])
    assert len(list(root.glob("*/*"))) == 60
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir()


def test_dynamos_tier_is_one_large_file_without_a_name(store):
    """KVBM's disk tier: fallocate must say that it isn't supported, for only then does it truncate instead."""
    size = 16 * MIB
    path = store.path / "dynamo-kvbm-disk-cache-a1b2c3"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
    assert FALLOC(fd, 0, ctypes.c_long(0), ctypes.c_long(size)) == -1
    assert ctypes.get_errno() == errno.EOPNOTSUPP
    os.ftruncate(fd, size)
    os.unlink(path)
    rng, blocks = random.Random(1), {}
    for _ in range(40):
        offset = rng.randrange(size // 65536) * 65536
        blocks[offset] = rng.randbytes(65536)
        assert os.pwrite(fd, aligned(blocks[offset]), offset) == 65536
        store.evict()
    buffer = mmap.mmap(-1, 65536)
    for offset in range(0, size, 65536):
        assert os.preadv(fd, [buffer], offset) == 65536
        assert buffer[:] == blocks.get(offset, bytes(65536))
    assert os.fstat(fd).st_size == size
    os.close(fd)
    assert not path.exists()


def test_mooncakes_allocator_syncs_what_it_renames(store):
    folder = store.path / "mooncake-offsets"
    folder.mkdir()
    data = os.open(folder / "data", os.O_RDWR | os.O_CREAT, 0o644)
    assert FALLOC(data, 0, ctypes.c_long(0), ctypes.c_long(MIB)) == -1
    os.ftruncate(data, MIB)
    for i in range(3):
        os.pwrite(data, b"%d" % i * 4096, i * 4096)
        meta = os.open(folder / "meta.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(meta, b"%d" % i)
        os.fsync(meta)
        os.close(meta)
        os.rename(folder / "meta.tmp", folder / "meta")
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(directory)
        os.close(directory)
        assert (folder / "meta").read_bytes() == b"%d" % i
    os.close(data)
    assert (folder / "data").read_bytes()[:12288] == b"0" * 4096 + b"1" * 4096 + b"2" * 4096


def test_what_crashed_writers_left_makes_room_like_any_value(tmp_path):
    """A writer that was killed leaves a temporary file: it counts, no client sees it, and it is evicted in its turn."""
    script = (
        "import os, sys, time\n"
        "for path in sys.argv[1:]:\n"
        "    os.write(os.open(path, os.O_WRONLY | os.O_CREAT), b'x' * (1 << 20))\n"
        "print('written', flush=True)\n"
        "time.sleep(60)\n"
    )
    names = [f".{uuid.uuid4().hex}.tmp", "h.bin_123.tmp", "block_77.tmp", "k.tmpa1b2c3d4"]
    with Mounted(tmp_path / "data", tmp_path / "mnt", capacity=16 * MIB) as store:
        paths = [store.path / name for name in names]
        with subprocess.Popen([sys.executable, "-c", script, *paths], stdout=-1) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"written\n"
            writer.send_signal(signal.SIGKILL)
        while store.call("status")["mountpoints"][0]["entries"] < len(names):
            pass  # the kernel closes what the process had open a moment later
        assert [store.get(name) for name in names] == [None] * len(names)
        assert store.call("status")["mountpoints"][0]["committed_bytes"] > len(names) * MIB
        for i in range(16):
            (store.path / f"v{i}").write_bytes(bytes(MIB))
        assert [path for path in paths if path.exists()] == []
        assert (store.path / "v15").read_bytes() == bytes(MIB)
        store.call("check")
        assert store.stop() == ""
