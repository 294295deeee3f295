"""Access rules on the mount, with processes of other users."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.needs import needs_root

ROOT = Path(__file__).resolve().parents[2]
ALICE, BOB, ML = 61001, 61002, 62001
CONFIG = """
[store]
socket = "{folder}/sock"
mount = "{folder}/mnt"
mount_mode = "0777"
[[mountpoints]]
path = "{folder}/data"
capacity = "64MiB"
[[access]]
prefix = "a/"
users = [{alice}]
[[access]]
prefix = "b/"
groups = [{ml}]
write = false
"""

pytestmark = [
    pytest.mark.mount,
    needs_root,
]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    for directory in (tmp_path, *tmp_path.parents[:2]):  # others must come through; it may be /tmp
        os.chmod(directory, directory.stat().st_mode | 0o011)
    (tmp_path / "data").mkdir()
    (tmp_path / "kvcsfs.toml").write_text(CONFIG.format(folder=tmp_path, alice=ALICE, ml=ML))
    command = [sys.executable, "-m", "kvcsfs.cli", "serve", "--config", str(tmp_path / "kvcsfs.toml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT) as process:
        assert process.stdout is not None
        assert b"ready" in process.stdout.readline()
        for name in ("a", "b", "c"):
            (tmp_path / "mnt" / name).mkdir()
            (tmp_path / "mnt" / name / "k").write_bytes(b"value")
            os.chmod(tmp_path / "mnt" / name, 0o777)
            os.chmod(tmp_path / "mnt" / name / "k", 0o666)
        yield tmp_path / "mnt"
        process.terminate()
        assert process.wait(20) == 0


def act(mount: Path, uid: int, groups: Sequence[int], code: str) -> int:
    """Run code with `m` as the mount in a process of a user; the errno it ended with, or 0."""
    pid = os.fork()
    if pid == 0:
        status = 255
        try:
            os.setgroups(list(groups))
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            exec(code, {"os": os, "m": str(mount)})
            status = 0
        except OSError as exc:
            status = exc.errno or 254
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


READ = "assert open(m + '/{}/k', 'rb').read() == b'value'"


def test_the_rules_hold_for_opening_and_for_every_change(mount):
    assert act(mount, ALICE, [], READ.format("a")) == 0
    assert act(mount, ALICE, [], "open(m + '/a/new', 'wb').write(b'x')") == 0
    assert act(mount, ALICE, [], "os.mkdir(m + '/a/d'); os.rmdir(m + '/a/d')") == 0
    assert act(mount, ALICE, [], "os.rename(m + '/a/new', m + '/a/other'); os.unlink(m + '/a/other')") == 0
    for code in (
        READ.format("b"),
        READ.format("c"),
        "open(m + '/c/k', 'ab').write(b'x')",
        "open(m + '/b/new', 'wb').write(b'x')",
        "os.truncate(m + '/c/k', 1)",
        "os.unlink(m + '/c/k')",
        "os.rename(m + '/a/k', m + '/c/k')",
        "os.rename(m + '/c/k', m + '/a/taken')",
        "os.mkdir(m + '/b/d')",
        "os.utime(m + '/c/k')",
    ):
        assert act(mount, ALICE, [], code) == errno.EACCES, code
    assert sorted(os.listdir(mount / "a")) == sorted(os.listdir(mount / "c")) == ["k"]


def test_supplementary_groups_count(mount):
    assert act(mount, BOB, [ML], READ.format("b")) == 0
    assert act(mount, BOB, [], READ.format("b")) == errno.EACCES
    assert act(mount, BOB, [ML], "open(m + '/b/k', 'r+b')") == errno.EACCES, "no right to write"
    assert act(mount, 0, [], READ.format("c")) == 0, "root may always"
