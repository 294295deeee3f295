"""kill -9 of a program whose request the daemon has been told of but hasn't read: the kernel takes it back."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcs import KvcsLowLevelClient, LLPutItem
from tests.daemons import Daemon, store_file
from tests.needs import needs_fuse

pytestmark = [
    pytest.mark.fault,
    pytest.mark.mount,
    needs_fuse,
]

# While the file "late" is there, a request is read only when the program that made it is gone.
READS_LATE = """
import os, time
from kvcsfs.fuse.dispatch import Dispatch
real = Dispatch.wait_readable
async def wait_readable(self, fd):
    await real(self, fd)
    if os.path.exists({late!r}):
        print("asked", flush=True)
        while os.path.exists({late!r}):
            time.sleep(0.01)
Dispatch.wait_readable = wait_readable
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(store_file(tmp_path, mount=True), READS_LATE.format(late=str(tmp_path / "late"))) as made:
        yield made


def test_a_request_that_is_taken_back_holds_nobody_up(daemon, tmp_path):
    late = tmp_path / "late"
    with KvcsLowLevelClient(tmp_path / "sock", default_deadline_s=5) as client:
        client.ll_batch_put([LLPutItem("d/key", b"value")])
        for _ in range(3):
            late.touch()
            program = subprocess.Popen(["stat", tmp_path / "mnt" / "absent"], stderr=subprocess.DEVNULL)
            assert daemon.process.stdout is not None
            assert daemon.process.stdout.readline() == "asked\n"
            program.kill()
            program.wait()
            late.unlink()
            (found,) = client.ll_batch_query(["d/key"])
            assert found.status == "ok"
    assert (tmp_path / "mnt" / "d" / "key").read_bytes() == b"value"
    assert "Traceback" not in daemon.stop()
