"""Directories of the mount: which ones stay, listing them, and the tools that walk them."""

import os
import shutil
import stat
import subprocess
import threading

import pytest

from tests.faces.mounted import eventually
from tests.faces.paths import key
from tests.needs import needs_fuse

pytestmark = [
    pytest.mark.mount,
    needs_fuse,
]
MIB = 1 << 20


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
