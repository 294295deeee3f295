"""The POSIX face on a real mount, by the system calls that programs make."""

import ctypes
import errno
import mmap
import os
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faces.mounted import Mounted, eventually
from tests.needs import needs_fuse

pytestmark = [
    pytest.mark.mount,
    needs_fuse,
]
MIB = 1 << 20


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Iterator[Mounted]:
    base = tmp_path_factory.mktemp("posix")
    with Mounted(base / "data", base / "mnt") as mounted:
        yield mounted
        mounted.call("check")
        assert mounted.stop() == ""
    assert os.listdir(base / "mnt") == []


@pytest.fixture
def own(tmp_path) -> Iterator[Mounted]:
    """A store that the test may stop and kill."""
    with Mounted(tmp_path / "data", tmp_path / "mnt") as mounted:
        yield mounted


@pytest.fixture
def folder(store, request) -> Iterator[Path]:
    path = store.path / request.node.name
    path.mkdir()
    yield path
    store.call("check")
    shutil.rmtree(path)


def key(path: Path, store: Mounted) -> str:
    return str(path.relative_to(store.path))


def fails(code: int):
    return pytest.raises(OSError, check=lambda exc: exc.errno == code)


# -- values and files


def test_a_written_file_is_a_value_once_it_is_closed(store, folder):
    data = os.urandom(3 * MIB + 17)
    path = folder / "v"
    with open(path, "wb") as file:
        file.write(data[:MIB])
        file.flush()
        assert store.get(key(path, store)) is None
        file.write(data[MIB:])
    assert store.get(key(path, store)) == data
    assert path.read_bytes() == data
    assert path.stat().st_size == len(data)


def test_a_put_is_a_file_at_once(store, folder):
    path = folder / "deep" / "er" / "v"
    assert not path.exists()
    store.put(key(path, store), b"x" * 5000)
    assert path.read_bytes() == b"x" * 5000
    assert os.listdir(folder / "deep" / "er") == ["v"]
    assert path.stat().st_blocks * 512 == 8192 + 4096


def test_a_replaced_value_is_the_new_one_at_once_and_the_old_one_for_who_has_it_open(store, folder):
    path = folder / "v"
    for size in (10_000, 10_000, 20_000):
        store.put(key(path, store), b"a" * size)
        assert path.read_bytes() == b"a" * size
        with open(path, "rb", buffering=0) as old:
            assert old.read(100) == b"a" * 100
            store.put(key(path, store), b"b" * (size + 1))
            assert path.read_bytes() == b"b" * (size + 1)
            assert old.read() == b"a" * (size - 100)
            assert os.fstat(old.fileno()).st_size == size
        eventually(lambda size=size: path.stat().st_size == size + 1)


def test_a_deleted_value_stays_readable_where_it_is_open(store, folder):
    path = folder / "v"
    path.write_bytes(b"q" * MIB)
    with open(path, "rb", buffering=0) as file:
        store.evict(key(folder, store))
        assert store.get(key(path, store)) is not None  # somebody reads it
        store.delete(key(path, store))
        assert store.get(key(path, store)) is None
        assert file.read() == b"q" * MIB
        assert os.fstat(file.fileno()).st_size == MIB
    with fails(errno.ENOENT):
        path.read_bytes()
    eventually(lambda: not path.exists())
    assert folder.is_dir()


def test_an_overwritten_file_keeps_its_old_value_until_it_is_closed(store, folder):
    path = folder / "v"
    path.write_bytes(b"old")
    with open(path, "r+b", buffering=0) as file:
        file.seek(1)
        file.write(b"LDER")
        assert store.get(key(path, store)) == b"old"
        assert path.read_bytes() == b"oLDER"
    assert store.get(key(path, store)) == b"oLDER"


def test_an_open_reader_keeps_the_old_content_when_another_process_replaces_the_file(store, folder):
    path = folder / "v"
    path.write_bytes(b"old" * 1000)
    with open(path, "rb", buffering=0) as old:
        (folder / "new.tmp").write_bytes(b"new" * 2000)
        os.replace(folder / "new.tmp", path)
        assert old.read() == b"old" * 1000
        assert path.read_bytes() == b"new" * 2000
    assert store.get(key(path, store)) == b"new" * 2000
    assert os.listdir(folder) == ["v"]


def test_empty_files_live_in_the_mount_alone(store, folder):
    path = folder / "empty"
    path.touch()
    assert path.stat().st_size == 0
    assert store.get(key(path, store)) is None
    path.write_bytes(b"now a value")
    assert store.get(key(path, store)) == b"now a value"
    os.truncate(path, 0)
    assert store.get(key(path, store)) is None
    assert path.read_bytes() == b""


def test_a_put_takes_the_place_of_an_empty_file(store, folder):
    path = folder / "v"
    path.touch()
    store.put(key(path, store), b"value")
    assert path.read_bytes() == b"value"


# -- opening and writing


def test_open_flags(folder):
    path = folder / "v"
    with fails(errno.ENOENT):
        os.open(path, os.O_RDWR)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(fd, b"one")
    os.close(fd)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with fails(errno.EEXIST):
        os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    with fails(errno.EISDIR):
        os.open(folder, os.O_RDWR)
    with fails(errno.ENOTDIR):
        os.open(path / "below", os.O_RDONLY)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"two")
    os.close(fd)
    assert path.read_bytes() == b"onetwo"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    assert path.stat().st_size == 0
    os.write(fd, b"3")
    os.close(fd)
    assert path.read_bytes() == b"3"
    fd = os.open(path, os.O_RDONLY | os.O_NOATIME)
    with fails(errno.EBADF):
        os.write(fd, b"x")
    os.close(fd)


def test_two_appenders_lose_nothing(store, folder):
    path = folder / "log"
    a, b = (os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) for _ in range(2))
    for i in range(50):
        os.write((a, b)[i % 2], b"%03d\n" % i)
    os.close(a)
    assert store.get(key(path, store)) is None
    os.close(b)
    assert path.read_bytes() == b"".join(b"%03d\n" % i for i in range(50))
    assert store.get(key(path, store)) == path.read_bytes()


def test_writes_anywhere(store, folder):
    path = folder / "sparse"
    model = bytearray(2 * MIB + 5)
    with open(path, "w+b", buffering=0) as file:
        for offset, size in ((2 * MIB, 5), (10, 100), (MIB - 3, 6), (4096, 4096), (0, 1)):
            data = os.urandom(size)
            model[offset : offset + size] = data
            os.pwrite(file.fileno(), data, offset)
        assert os.pread(file.fileno(), len(model) + 9, 0) == model
        assert os.pread(file.fileno(), 10, len(model)) == b""
    assert path.read_bytes() == model
    assert store.get(key(path, store)) == bytes(model)


def test_ftruncate_up_and_down_leaves_zeros(store, folder):
    path = folder / "v"
    with open(path, "w+b", buffering=0) as file:
        file.write(b"x" * 10_000)
        for size in (100, 9000, 0, 5000, 5000):
            os.ftruncate(file.fileno(), size)
            assert os.fstat(file.fileno()).st_size == size
        assert os.pread(file.fileno(), 9000, 0) == bytes(5000)
        os.pwrite(file.fileno(), b"y", 6000)
    expected = bytes(6000) + b"y"
    assert store.get(key(path, store)) == expected == path.read_bytes()
    os.truncate(path, 3)
    assert store.get(key(path, store)) == bytes(3)
    os.truncate(path, 8)
    assert path.read_bytes() == bytes(8)


def test_a_slot_that_is_written_again_shows_nothing_of_what_was_in_it(store, folder):
    size = 100_000
    zeros: bytes = bytes(size)
    ones: bytes = b"\xff" * size

    def gap(fd):
        os.pwrite(fd, b"a" * 10, 0)
        os.pwrite(fd, b"b" * 10, size - 10)
        return b"a" * 10 + zeros[20:] + b"b" * 10

    def longer(fd):
        os.pwrite(fd, b"a" * 10, 0)
        os.ftruncate(fd, size)
        return b"a" * 10 + zeros[10:]

    def shorter(fd):
        os.pwrite(fd, ones, 0)
        os.ftruncate(fd, 10)
        os.ftruncate(fd, 5000)
        return ones[:10] + zeros[:4990]

    def beyond(fd):
        os.pwrite(fd, b"a" * (size + 1), 0)
        os.pwrite(fd, b"b", 2 * size)
        return bytes(b"a" * (size + 1) + zeros[:-1] + b"b")

    for fill in (gap, longer, shorter, beyond, lambda fd: b"c" * os.pwrite(fd, b"c" * size, 0)):
        old, new = folder / "old", folder / "new"
        for _ in range(2):  # the second has the likely size; what it replaces is a free slot
            old.write_bytes(ones)
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        expected = fill(fd)
        assert os.pread(fd, 3 * size, 0) == expected
        os.close(fd)
        assert store.get(key(new, store)) == expected
        store.call("check")


def test_reading_while_somebody_writes(folder):
    path = folder / "v"
    with open(path, "wb", buffering=0) as writer:
        writer.write(b"a" * 1000)
        with open(path, "rb", buffering=0) as reader:
            assert reader.read() == b"a" * 1000
            writer.write(b"b" * 1000)
            assert path.stat().st_size == 2000
            assert reader.read() == b"b" * 1000
            writer.close()
            reader.seek(0)
            assert reader.read() == b"a" * 1000 + b"b" * 1000


def test_a_reader_from_before_the_commit_outlives_a_delete(store, folder):
    path = folder / "v"
    with open(path, "wb", buffering=0) as writer:
        writer.write(b"a" * 100_000)
        reader = os.open(path, os.O_RDONLY)
    assert store.get(key(path, store)) is not None
    store.delete(key(path, store))
    assert os.pread(reader, 200_000, 0) == b"a" * 100_000
    os.close(reader)


def test_two_flushes_are_no_two_commits(store, folder):
    path = folder / "v"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    other = os.dup(fd)
    os.write(fd, b"half")
    os.close(fd)
    assert store.get(key(path, store)) is None  # waits 0.2 s for a release, which doesn't come
    os.write(other, b"whole")
    os.close(other)
    assert store.get(key(path, store)) == b"halfwhole"


def test_fsync_commits_and_the_handle_goes_on(store, folder):
    path = folder / "v"
    with open(path, "wb", buffering=0) as file:
        file.write(b"one")
        os.fsync(file.fileno())
        assert store.get(key(path, store)) == b"one"
        file.write(b"two")
        assert store.get(key(path, store)) == b"one"
        assert path.read_bytes() == b"onetwo"
    assert store.get(key(path, store)) == b"onetwo"
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


def test_no_room_is_enospc_at_write_and_costs_nothing(store, folder):
    path = folder / "big"
    before = store.call("status")["mountpoints"][0]["reserved_bytes"]
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    chunk = bytes(MIB)
    with fails(errno.ENOSPC):
        for _ in range(80):
            os.write(fd, chunk)
    os.close(fd)
    os.unlink(path)
    eventually(lambda: store.call("status")["mountpoints"][0]["reserved_bytes"] == before)


def test_too_large_is_efbig(folder):
    fd = os.open(folder / "v", os.O_WRONLY | os.O_CREAT)
    with fails(errno.EFBIG):
        os.pwrite(fd, b"x", 4 << 30)
    os.close(fd)


# -- mapping and direct I/O


def test_private_and_shared_maps(store, folder):
    path = folder / "v"
    data = os.urandom(300_000)
    path.write_bytes(data)
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as area,
    ):
        store.delete(key(path, store))
        assert area[:] == data
    with open(path, "w+b") as shared:
        shared.truncate(8192)
        with mmap.mmap(shared.fileno(), 0) as area:
            area[4000:4200] = b"m" * 200
    assert store.get(key(path, store)) == bytes(4000) + b"m" * 200 + bytes(8192 - 4200)


def test_direct_io_as_vllm_probes_it(folder):
    probe = folder / ".o_direct_probe_1"
    fd = os.open(probe, os.O_CREAT | os.O_RDWR | os.O_DIRECT | os.O_TRUNC)
    area = mmap.mmap(-1, 8192)
    area[:] = b"d" * 8192
    assert os.write(fd, area) == 8192
    assert os.preadv(fd, [area], 4096) == 4096
    os.close(fd)
    os.unlink(probe)
    assert os.listdir(folder) == []


def test_fallocate_is_refused_as_programs_expect(folder):
    libc = ctypes.CDLL(None, use_errno=True)
    with open(folder / "v", "wb") as file:
        assert libc.fallocate(file.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(4096)) == -1
        assert ctypes.get_errno() == errno.EOPNOTSUPP
        os.posix_fallocate(file.fileno(), 0, 8192)  # glibc writes a byte to each block instead
    assert (folder / "v").stat().st_size == 8192


# -- names


def test_temporary_names_are_no_keys_until_renamed(store, folder):
    temporary, final = folder / ".0123456789abcdef.tmp", folder / "page"
    temporary.write_bytes(b"kv" * 1000)
    assert store.get(key(temporary, store)) is None
    assert os.listdir(folder) == [temporary.name]
    os.rename(temporary, final)
    assert store.get(key(final, store)) == b"kv" * 1000
    assert os.listdir(folder) == ["page"]


def test_rename_while_it_is_open_for_writing(store, folder):
    fd = os.open(folder / "x.tmp", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"one")
    os.rename(folder / "x.tmp", folder / "x")
    assert store.get(key(folder / "x", store)) is None
    os.write(fd, b"two")
    assert (folder / "x").read_bytes() == b"onetwo"
    os.close(fd)
    assert store.get(key(folder / "x", store)) == b"onetwo"


def test_a_renamed_file_stays_what_its_open_handles_write_to(store, folder):
    for i in range(30):
        old, new = folder / f"old{i}", folder / f"new{i}"
        old.write_bytes(b"value")
        new.write_bytes(b"x" * MIB)  # whose slot takes a while to be reclaimed
        fd = os.open(old, os.O_RDWR)
        os.rename(old, new)
        store.call("status")  # what watches the store has its turn
        os.pwrite(fd, b"newer", 0)
        assert os.fstat(fd).st_nlink == 1
        os.close(fd)
        assert new.read_bytes() == b"newer"
        assert store.get(key(new, store)) == b"newer"


def test_rename_over_files_in_every_state(store, folder):
    source, target = folder / "s", folder / "t"
    for old in (b"", b"old"):
        for new in (b"", b"new"):
            target.write_bytes(old)
            source.write_bytes(new)
            with open(target, "rb", buffering=0) as reader, open(target, "r+b", buffering=0) as writer:
                os.rename(source, target)
                writer.write(b"lost")
                assert reader.read() == b"lost"[: len(b"lost")]
                assert target.read_bytes() == new
            assert target.read_bytes() == new
            assert store.get(key(target, store)) == (new or None)
            assert os.listdir(folder) == ["t"]


def test_rename_over_a_value_and_on_leaves_nothing_of_it(store, folder):
    (folder / "b").write_bytes(b"old")
    with open(folder / "a", "wb", buffering=0):
        os.rename(folder / "a", folder / "b")
        os.rename(folder / "b", folder / "c")
        assert os.listdir(folder) == ["c"]
    assert store.get(key(folder / "b", store)) is None
    assert os.listdir(folder) == ["c"]


def test_a_file_being_written_is_listed_although_its_old_value_is_deleted(store, folder):
    path = folder / "v"
    path.write_bytes(b"old")
    with open(path, "wb", buffering=0):
        store.delete(key(path, store))
        assert os.listdir(folder) == ["v"]
    assert store.get(key(path, store)) is None
    assert os.listdir(folder) == ["v"]


def test_rename_errors(folder):
    (folder / "d" / "e").mkdir(parents=True)
    (folder / "full").mkdir()
    (folder / "full" / "f").write_bytes(b"x")
    (folder / "f").write_bytes(b"x")
    with fails(errno.ENOENT):
        os.rename(folder / "none", folder / "x")
    with fails(errno.EISDIR):
        os.rename(folder / "f", folder / "d")
    with fails(errno.ENOTDIR):
        os.rename(folder / "d", folder / "f")
    with fails(errno.ENOTEMPTY):
        os.rename(folder / "d" / "e", folder / "full")
    with fails(errno.EXDEV):
        os.rename(folder / "full", folder / "other")
    os.rename(folder / "d" / "e", folder / "e2")
    assert sorted(os.listdir(folder)) == ["d", "e2", "f", "full"]
    os.rename(folder / "f", folder / "full" / "g")
    assert sorted(os.listdir(folder / "full")) == ["f", "g"]
    assert renameat2(folder / "full" / "f", folder / "full" / "g", 1) == errno.EEXIST
    assert renameat2(folder / "full" / "f", folder / "h", 1) == 0
    assert renameat2(folder / "h", folder / "full" / "g", 2) == errno.EINVAL


def renameat2(old: Path, new: Path, flags: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    at = -100  # AT_FDCWD
    return ctypes.get_errno() if libc.renameat2(at, os.fsencode(old), at, os.fsencode(new), flags) else 0


def test_unlink_while_open(store, folder):
    path = folder / "v"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(fd, b"abc")
    os.unlink(path)
    with fails(errno.ENOENT):
        os.stat(path)
    os.write(fd, b"def")
    assert os.pread(fd, 10, 0) == b"abcdef"
    assert os.fstat(fd).st_size == 6
    assert os.fstat(fd).st_nlink == 0
    os.fchmod(fd, 0o600)
    path.write_bytes(b"another")
    os.close(fd)
    assert store.get(key(path, store)) == b"another"
    reader = os.open(path, os.O_RDONLY)
    os.unlink(path)
    assert os.pread(reader, 10, 0) == b"another"
    os.close(reader)
    assert store.get(key(path, store)) is None


def test_errors_of_names(folder):
    with fails(errno.EEXIST):
        os.mkdir(folder)
    with fails(errno.ENOENT):
        os.rmdir(folder / "none")
    with fails(errno.ENOENT):
        os.unlink(folder / "none")
    with fails(errno.ENAMETOOLONG):
        Path(folder / ("x" * 256)).touch()
    with fails(errno.EILSEQ):
        os.open(os.fsencode(folder) + b"/\xff", os.O_CREAT)
    with fails(errno.EINVAL):
        Path(folder / "%0x").touch()
    (folder / ("x" * 255)).write_bytes(b"x")
    deep = folder
    for _ in range(3):
        deep = deep / ("d" * 250)
        deep.mkdir()
    with fails(errno.ENAMETOOLONG):
        Path(deep / ("x" * 255)).touch()
    (folder / "f").write_bytes(b"x")
    with fails(errno.ENOTEMPTY):
        os.rmdir(folder)
    with fails(errno.ENOTDIR):
        os.rmdir(folder / "f")
    with fails(errno.EISDIR):
        os.unlink(deep)
    for make in (os.link, os.symlink):
        with fails(errno.EPERM):
            make(folder / "f", folder / "g")
    with fails(errno.EPERM):
        os.mkfifo(folder / "fifo")


def test_every_key_has_a_path(store, folder):
    base = key(folder, store)
    long = "é" * 200 + "x" * 200
    for component in ("", ".", "..", "%0", "%", "a b", long, long + "y"):
        store.put(f"{base}/{component}/v", component.encode()[:50] or b"-")
    store.put(f"{base}/a", b"file")
    store.put(f"{base}/a/b", b"below")
    store.put(f"{base}/{long}", b"long file")
    assert {"%0", "%.", "%..", "%%0", "%", "a b", "a", "%=a"} == {
        n for n in os.listdir(folder) if not n.startswith("%+")
    }
    assert (folder / "%=a").read_bytes() == b"file"
    assert (folder / "a" / "b").read_bytes() == b"below"
    assert (folder / "%%0" / "v").read_bytes() == b"%0"
    files = [Path(top) / name for top, _, found in os.walk(folder) for name in found]
    assert len(files) == 11
    assert {f.read_bytes() for f in files} >= {b"long file", b"file", b"below", b"-"}


def test_a_directory_appears_beside_a_file_and_goes_again(store, folder):
    base = key(folder, store)
    store.put(f"{base}/a", b"file")
    assert (folder / "a").read_bytes() == b"file"
    store.put(f"{base}/a/b", b"below")
    eventually((folder / "a").is_dir)
    assert sorted(os.listdir(folder)) == ["%=a", "a"]
    assert (folder / "%=a").read_bytes() == b"file"
    store.delete(f"{base}/a/b")
    eventually((folder / "a").is_file)
    assert os.listdir(folder) == ["a"]


# -- directories


def test_directories_that_programs_use_stay_and_others_go(store, folder):
    base = key(folder, store)
    store.put(f"{base}/put/v", b"x")
    assert os.listdir(folder) == ["put"]
    store.evict(base)
    eventually(lambda: os.listdir(folder) == [] and not (folder / "put").exists())
    store.put(f"{base}/put/v", b"x")
    (folder / "put" / "w").write_bytes(b"y")
    assert store.get(f"{base}/put/w") == b"y"
    store.evict(base)
    eventually(lambda: os.listdir(folder / "put") == [])
    (folder / "put" / "again").write_bytes(b"z")


def test_listing_thousands_while_others_come_and_go(store, folder):
    base = key(folder, store)
    lasting = [f"k{i:05d}" for i in range(0, 5000, 2)]
    for name in lasting:
        store.put(f"{base}/{name}", b"x")
    (folder / "k02500.d").mkdir()
    stop = threading.Event()

    def churn() -> None:
        i = 1
        while not stop.is_set():
            (folder / f"k{i:05d}").touch()
            (folder / f"k{(i * 7) % 5000 | 1:05d}").unlink(missing_ok=True)
            i = (i + 2) % 5000

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(3):
            names = os.listdir(folder)
            assert len(names) == len(set(names))
            assert {*lasting, "k02500.d"} <= set(names)
    finally:
        stop.set()
        thread.join()
    fd = os.open(folder, os.O_RDONLY)
    assert set(os.listdir(fd)) == set(os.listdir(fd))  # rewinds
    os.close(fd)
    shutil.rmtree(folder)
    folder.mkdir()


def test_tools(store, folder):
    source = folder / "src"
    source.mkdir()
    (source / "one").write_bytes(b"1" * 10_000)
    (source / "two").write_bytes(b"")
    os.utime(source / "one", ns=(10**18, 10**18))
    os.chmod(source / "one", 0o640)
    os.chown(source / "one", 12, 34)
    ran = subprocess.run(["cp", "-a", source, folder / "dst"], capture_output=True, text=True, check=True)
    assert ran.stderr == ""
    found = (folder / "dst" / "one").stat()
    assert (found.st_mtime_ns, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (
        10**18,
        0o640,
        12,
        34,
    )
    used = subprocess.run(["du", "-sB1", folder / "dst"], capture_output=True, text=True, check=True)
    assert used.stdout.split()[0] == str(12288 + 4096)
    subprocess.run(["find", folder, "-name", "one"], check=True, capture_output=True)
    subprocess.run(["rm", "-r", folder / "src", folder / "dst"], check=True)
    assert os.listdir(folder) == []


def test_statfs_tells_capacity_and_use(store, folder):
    before = os.statvfs(store.path)
    assert before.f_blocks * before.f_frsize == 64 * MIB
    assert before.f_bsize == 4096
    (folder / "v").write_bytes(bytes(4 * MIB))
    assert store.get(key(folder / "v", store)) is not None
    after = os.statvfs(store.path)
    assert before.f_bfree - after.f_bfree == 4 * MIB // 4096 + 1


# -- the engines' own ways


def test_in_place_writers_are_published_at_their_end(store, folder):
    path = folder / "chunk@1.pt"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
    for i in range(4):
        os.write(fd, bytes([i]) * 100_000)
    assert store.get(key(path, store)) is None
    os.close(fd)
    assert store.get(key(path, store)) == b"".join(bytes([i]) * 100_000 for i in range(4))


def test_a_dead_writer_leaves_what_it_wrote_under_its_temporary_name(store, folder):
    script = "import os, sys; f = open(sys.argv[1], 'wb', 0); f.write(b'x' * 9000); os._exit(1)"
    subprocess.run(["python3", "-c", script, folder / "dead.tmp"], check=False)
    eventually(lambda: (folder / "dead.tmp").stat().st_blocks == 12288 // 512 + 8)
    assert store.get(key(folder / "dead.tmp", store)) is None
    store.evict("")
    eventually(lambda: os.listdir(folder) == [])


# -- robustness


@pytest.mark.parametrize("method", ["find", "open_many", "stage_file", "commit_file", "children", "space"])
def test_an_exception_in_one_operation_is_one_error(own, method):
    store = own
    (store.path / "v").write_bytes(b"value")
    assert store.get("v") == b"value"
    store.call("fail", method=method)
    errors = []
    for act in (
        lambda: os.statvfs(store.path),
        lambda: (store.path / "w").write_bytes(b"another"),
        lambda: os.listdir(store.path),
        (store.path / "v").read_bytes,
    ):
        try:
            act()
        except OSError as exc:
            errors.append(exc.errno)
    assert errors in ([errno.EIO], []) and (
        errors or method == "commit_file"
    )  # a release's error reaches nobody
    assert (store.path / "v").read_bytes() == b"value"
    (store.path / "w").write_bytes(b"again")
    assert (store.path / "w").read_bytes() == b"again"
    store.call("check")
    assert "injected" in store.stop()


def test_a_stop_keeps_what_was_closed_and_drops_what_was_not(own):
    store = own
    (store.path / "made").mkdir()
    (store.path / "empty").touch()
    (store.path / "v").write_bytes(b"value")
    os.chmod(store.path / "v", 0o600)
    fd = os.open(store.path / "half", os.O_CREAT | os.O_WRONLY)
    os.write(fd, b"half")
    assert store.stop() == ""
    with fails(errno.ENOTCONN):
        os.write(fd, b"x")
    with fails(errno.ENOTCONN):
        os.close(fd)
    store.start()
    assert sorted(os.listdir(store.path)) == ["empty", "made", "v"]
    assert (store.path / "v").read_bytes() == b"value"
    assert stat.S_IMODE((store.path / "v").stat().st_mode) == 0o600
    assert store.stop() == ""


def test_a_killed_daemon_leaves_a_mount_that_the_next_one_clears(own, tmp_path):
    store = own
    (store.path / "v").write_bytes(b"value")
    store.get("v")
    os.stat(store.path)
    store.kill()
    with fails(errno.ENOTCONN):
        os.listdir(store.path)
    store.start()
    assert (store.path / "v").read_bytes() == b"value"
    with pytest.raises(RuntimeError, match=r"no mount: .*busy mount point.*\n$"):
        Mounted(tmp_path / "other", store.path)
    assert store.stop() == ""
    assert str(store.path) not in Path("/proc/self/mounts").read_text()


def test_what_is_known_of_directories_survives_a_crash_a_moment_later(own, tmp_path):
    """An engine makes its directories once, when it starts: it can't store in one that is gone."""
    (own.path / "engine" / "tmp").mkdir(parents=True)
    (own.path / "gone").mkdir()
    os.chmod(own.path / "engine", 0o2750)
    (own.path / "v").write_bytes(b"value")
    os.chmod(own.path / "v", 0o600)
    os.rmdir(own.path / "gone")
    (own.path / "old").mkdir()
    os.rename(own.path / "old", own.path / "new")
    time.sleep(1.5)
    own.kill()
    own.start()
    assert sorted(os.listdir(own.path)) == ["engine", "new", "v"]
    assert os.listdir(own.path / "engine") == ["tmp"]
    assert stat.S_IMODE((own.path / "engine").stat().st_mode) == 0o2750
    assert stat.S_IMODE((own.path / "v").stat().st_mode) == 0o600


def test_other_mountpoints(tmp_path):
    with Mounted(tmp_path / "data", tmp_path / "mnt", mountpoints=2) as store:
        check_mountpoints(store)
        store.call("check")
        assert store.stop() == ""


def check_mountpoints(store):
    hub = store.path / ".mountpoints"
    assert sorted(os.listdir(hub)) == ["0", "1"]
    store.put("p/v", b"first", index=0)
    store.put("p/v", b"second", index=1)
    assert (store.path / "p" / "v").read_bytes() == (hub / "0" / "p" / "v").read_bytes() == b"first"
    assert (hub / "1" / "p" / "v").read_bytes() == b"second"
    with fails(errno.EXDEV):
        os.rename(store.path / "p" / "v", hub / "1" / "w")
    (hub / "1" / "w").write_bytes(b"w")
    assert store.get("w", index=1) == b"w"
    assert store.get("w", index=0) is None
    assert sorted(os.listdir(store.path)) == [".mountpoints", "p"]
    for name in ("2", "x"):
        with fails(errno.ENOENT):
            os.stat(hub / name)
    with fails(errno.EPERM):
        (hub / "new").write_bytes(b"x")


def test_nothing_stays_mounted_when_the_daemon_fails(own):
    (own.path / "v").write_bytes(b"value")
    own.process.stdin.write("not json\n")
    own.process.stdin.flush()
    assert "JSONDecodeError" in own.process.communicate(timeout=20)[1]
    assert os.listdir(own.path) == []
    own.start()
    assert (own.path / "v").read_bytes() == b"value"
    own.stop()


def test_unmounted_by_somebody_else(own):
    subprocess.run(["umount", own.path], check=True)
    eventually(lambda: own.call("status")["sessions"] == 1)
    own.put("v", b"x")
    assert "the mount has ended" in own.stop()


def test_a_bad_mount_point_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match=r"no mount: [^\n]*can't be a mount point: [^\n]*\n$"):
        Mounted(tmp_path / "data", tmp_path / "file")
    with pytest.raises(RuntimeError, match=r"no mount: [^\n]*can't be a mount point: [^\n]*\n$"):
        Mounted(tmp_path / "data", tmp_path / "file" / "below")
