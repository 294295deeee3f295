"""Who may do what on the mount, further places of it, and extended attributes."""

import errno
import multiprocessing
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kvcsfs.mounts import bind, mounted
from tests.faces.mounted import ROOT, Mounted
from tests.needs import needs_fuse, needs_root

pytestmark = [
    pytest.mark.mount,
    needs_fuse,
    needs_root,
]
ALICE, BOB, TEAM = 4001, 4002, 4100


def as_user(uid: int, gid: int, act: Callable[[], Any]) -> Any:
    """What an act of another user returns, or the name of its errno."""
    receive, send = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        os.umask(0o022)
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
        try:
            send.send(act())
        except OSError as exc:
            send.send(errno.errorcode[exc.errno or 0])

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    result = receive.recv()
    process.join()
    return result


def who(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)


def test_tenants_that_may_not_read_each_other(tmp_path):
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:-1]:
        parent.chmod(parent.stat().st_mode | 0o011)
    permissions = [
        {"prefix": "", "group": TEAM},
        {"prefix": "a", "owner": ALICE, "mode": 0o700},
        {"prefix": "b", "owner": BOB, "mode": 0o2770},
    ]
    with Mounted(tmp_path / "data", tmp_path / "mnt", permissions=permissions) as store:
        for key in ("a/x/v", "b/v", "c/v"):
            store.put(key, b"value")
        assert who(store.path) == (0, TEAM, 0o755)
        assert who(store.path / "c" / "v") == (0, TEAM, 0o644)
        assert who(store.path / "a") == who(store.path / "a" / "x") == (ALICE, TEAM, 0o700)
        assert who(store.path / "a" / "x" / "v") == (ALICE, TEAM, 0o600)
        assert who(store.path / "b" / "v") == (BOB, TEAM, 0o660)

        def read(key: str) -> Any:
            path = store.path / key
            return path.read_bytes

        assert as_user(ALICE, ALICE, read("a/x/v")) == b"value"
        assert as_user(BOB, BOB, read("a/x/v")) == "EACCES"
        assert as_user(ALICE, TEAM, read("b/v")) == b"value"
        assert as_user(ALICE, ALICE, read("b/v")) == "EACCES"
        assert as_user(BOB, BOB, read("c/v")) == b"value"
        assert as_user(BOB, BOB, lambda: (store.path / "c" / "w").write_bytes(b"x")) == "EACCES"
        assert as_user(ALICE, ALICE, (store.path / "new").mkdir) == "EACCES"
        # What a member of the group makes there is the group's, further down, too.
        assert as_user(ALICE, TEAM, (store.path / "b" / "d").mkdir) is None
        assert as_user(ALICE, TEAM, lambda: (store.path / "b" / "d" / "f").write_bytes(b"x")) == 1
        assert who(store.path / "b" / "d") == (ALICE, TEAM, 0o2755)
        assert who(store.path / "b" / "d" / "f") == (ALICE, TEAM, 0o644)
        assert as_user(BOB, BOB, lambda: os.chmod(store.path / "b" / "d", 0o777)) == "EPERM"
        assert as_user(ALICE, TEAM, lambda: os.chmod(store.path / "b" / "d", 0o700)) is None
        store.call("check")
        assert store.stop() == ""


def test_a_write_takes_the_right_to_run_as_the_owner_away(tmp_path):
    with Mounted(tmp_path / "data", tmp_path / "mnt") as store:
        path = store.path / "v"
        for flags in (os.O_WRONLY, os.O_RDWR):
            path.write_bytes(b"program")
            path.chmod(0o6777)
            assert who(path)[2] == 0o6777
            fd = os.open(path, flags)
            os.write(fd, b"other")
            assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o777
            os.close(fd)
            assert who(path)[2] == 0o777
        assert store.stop() == ""


def test_a_read_only_mount(tmp_path):
    with Mounted(tmp_path / "data", tmp_path / "mnt", mount_read_only=True) as store:
        store.put("d/v", b"value")
        path = store.path / "d" / "v"
        assert path.read_bytes() == b"value"
        for act in (
            lambda: path.write_bytes(b"other"),
            path.unlink,
            (store.path / "e").mkdir,
            lambda: path.rename(store.path / "w"),
            lambda: path.chmod(0o600),
        ):
            with pytest.raises(OSError, check=lambda exc: exc.errno == errno.EROFS):
                act()
        store.put("d/v", b"newer")
        assert store.get("d/v") == b"newer"
        assert store.stop() == ""


def test_a_second_place_shows_the_same_store_or_a_prefix_of_it(tmp_path):
    places = [
        {"path": str(tmp_path / "again")},
        {"path": str(tmp_path / "with space"), "prefix": "t", "read_only": True},
    ]
    with Mounted(tmp_path / "data", tmp_path / "mnt", places=places) as store:
        again, tenant = tmp_path / "again", tmp_path / "with space"
        (again / "t" / "made").write_bytes(b"value")
        store.put("t/put", b"value")
        assert sorted(os.listdir(tenant)) == ["made", "put"]
        assert (tenant / "put").read_bytes() == b"value"
        with pytest.raises(OSError, check=lambda exc: exc.errno == errno.EROFS):
            (tenant / "made").unlink()
        while store.call("status")["mountpoints"][0]["entries"]:  # what was read is let go a moment later
            store.evict()
        assert os.listdir(tenant) == os.listdir(store.path / "t") == []  # the prefix stays, as it was mounted
        store.put("t/later", b"value")
        assert os.listdir(tenant) == ["later"]
        assert store.stop() == ""
        assert [mounted(p) for p in (store.path, again, tenant)] == [None] * 3
        # What a killed daemon leaves at a further place is cleared by the next.
        store.start()
        store.kill()
        store.start()
        assert os.listdir(tenant) == os.listdir(again / "t") == ["later"]
        bind(store.path, "t", tmp_path / "by hand", read_only=True)
        assert os.listdir(tmp_path / "by hand") == ["later"]
        assert store.stop() == ""
        subprocess.run(["umount", tmp_path / "by hand"], check=True)


def test_a_place_that_is_taken_stops_the_start_and_leaves_nothing(tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", taken], check=True)
    try:
        with pytest.raises(RuntimeError, match=r"no mount: [^\n]*taken: busy mount point, tmpfs[^\n]*\n$"):
            Mounted(tmp_path / "data", tmp_path / "mnt", places=[{"path": str(taken)}])
        assert mounted(tmp_path / "mnt") is None
    finally:
        subprocess.run(["umount", taken], check=True)


def test_the_mount_command(tmp_path):
    data, path, socket, second = (tmp_path / name for name in ("data", "mnt", "s.sock", "second"))
    data.mkdir()
    command = [sys.executable, "-m", "kvcsfs.cli"]
    serve = [*command, "serve", "--data", data, "--capacity", "64MiB", "--mount", path, "--socket", socket]
    with subprocess.Popen(serve, stdout=-1, stderr=-1, text=True, cwd=ROOT) as daemon:
        try:
            assert "ready" in daemon.stdout.readline()
            (path / "v").write_bytes(b"value")
            subprocess.run(
                [*command, "mount", second, "--read-only", "--socket", socket], check=True, cwd=ROOT
            )
            assert (second / "v").read_bytes() == b"value"
            subprocess.run(["umount", second], check=True)
        finally:
            daemon.terminate()
            daemon.communicate()


def test_extended_attributes_where_they_are_switched_on(tmp_path):
    with Mounted(tmp_path / "data", tmp_path / "mnt", mount_xattrs=True) as store:
        begun = time.time()
        store.put("t/d/v", b"value")
        store.put("t/w", b"12345678")
        store.get("t/w")
        path = store.path / "t"

        def get(path: Path, name: str) -> str:
            return os.getxattr(path, f"user.kvcs.{name}").decode()

        assert (get(path, "entries"), get(path, "bytes")) == ("2", "13")
        assert (get(store.path, "entries"), get(path / "d", "bytes")) == ("2", "5")
        assert get(path / "d" / "v", "checksum") == xxhash.xxh3_128_hexdigest(b"value")
        assert get(path / "w", "hits") == "1"
        assert begun - 1 < float(get(path / "w", "created")) <= float(get(path / "w", "used")) < time.time()
        assert os.listxattr(path) == []
        for name in ("user.kvcs.none", "user.other", "security.capability"):
            with pytest.raises(OSError, check=lambda exc: exc.errno == errno.ENODATA):
                os.getxattr(path / "w", name)
        with pytest.raises(OSError, check=lambda exc: exc.errno == errno.ENOTSUP):
            os.setxattr(path / "w", "user.other", b"x")
        assert store.stop() == ""


TOOLS = {
    "cp -a": ["cp", "-a", "{0}/.", "{1}"],
    "rsync -a": ["rsync", "-a", "{0}/", "{1}"],
    "tar": ["sh", "-c", "tar c -C {0} . | tar xp -C {1}"],
}


@pytest.mark.parametrize("tool", TOOLS)
def test_copying_with_owners_modes_and_times_makes_no_noise(tmp_path, tool):
    plain, back = tmp_path / "plain", tmp_path / "back"
    (plain / "d" / "e").mkdir(parents=True)
    back.mkdir()
    for name, mode, uid in (("a", 0o600, ALICE), ("d/b", 0o755, 0), ("d/e/empty", 0o440, BOB)):
        file = plain / name
        file.write_bytes(b"x" * 100_000 if "empty" not in name else b"")
        file.chmod(mode)
        os.chown(file, uid, TEAM)
        os.utime(file, (1e9, 1.1e9))
    (plain / "d").chmod(0o750)
    for directory in ("d/e", "d"):
        os.utime(plain / directory, (1e9, 1.2e9))

    def tree(path: Path) -> list[tuple[Any, ...]]:
        return sorted(
            (str(f.relative_to(path)), *who(f), f.stat().st_mtime, f.read_bytes() if f.is_file() else None)
            for f in path.rglob("*")
        )

    with Mounted(tmp_path / "data", tmp_path / "mnt") as store:
        there = store.path / "t"
        there.mkdir()
        for source, target in ((plain, there), (there, back)):
            command = [word.format(source, target) for word in TOOLS[tool]]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
            assert tree(target) == tree(plain)
        store.call("check")
        assert store.stop() == ""
