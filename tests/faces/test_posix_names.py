"""Names on the mount: temporary ones, renaming and unlinking while files are open, and a path for every key."""

import ctypes
import errno
import os
from pathlib import Path

import pytest

from tests.faces.mounted import eventually
from tests.faces.paths import fails, key
from tests.needs import needs_fuse

pytestmark = [
    pytest.mark.mount,
    needs_fuse,
]
MIB = 1 << 20


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
