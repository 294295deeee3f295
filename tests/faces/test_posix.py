"""The POSIX face on a real mount, by the system calls that programs make."""

import ctypes
import errno
import mmap
import os
import stat
import subprocess

import pytest

from tests.faces.mounted import eventually
from tests.faces.paths import fails, key
from tests.needs import needs_fuse

pytestmark = [
    pytest.mark.mount,
    needs_fuse,
]
MIB = 1 << 20


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
