"""What a mount goes through: failing operations, a stop, a kill, other mountpoints, a bad mount point."""

import errno
import os
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faces.mounted import Mounted, eventually
from tests.faces.paths import fails
from tests.needs import needs_fuse

pytestmark = [
    pytest.mark.mount,
    needs_fuse,
]


@pytest.fixture
def own(tmp_path) -> Iterator[Mounted]:
    """A store that the test may stop and kill."""
    with Mounted(tmp_path / "data", tmp_path / "mnt") as mounted:
        yield mounted


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


def test_a_mount_that_was_aborted_while_in_use_is_gone_and_the_store_serves_on(own):
    """`umount -f` of a busy mount aborts its connection and leaves it in the table."""
    file = own.path / "file"
    file.write_bytes(b"value")
    fd = os.open(file, os.O_RDONLY)
    assert subprocess.run(["umount", "-f", own.path], stderr=subprocess.PIPE, check=False).returncode
    with fails(errno.ENOTCONN):
        os.close(fd)
    eventually(lambda: f" {own.path} " not in Path("/proc/self/mounts").read_text())
    own.call("check")
    assert "the mount has ended" in own.stop()
