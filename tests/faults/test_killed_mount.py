"""kill -9 of a daemon with a mount, while the kernel waits for it: the process ends, and the mount with it."""

from __future__ import annotations

import subprocess
import time
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

# An unlink of "held" is never answered: it keeps the kernel's lock of its directory.
HOLDS = """
import trio
from kvcsfs.fuse.operations import Operations
real = Operations.unlink
async def unlink(self, parent, name, ctx):
    if name == b"held":
        print("held", flush=True)
        await trio.sleep_forever()
    await real(self, parent, name, ctx)
Operations.unlink = unlink
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(store_file(tmp_path, mount=True), HOLDS) as made:
        yield made


def waits_for_a_lock(pid: int) -> bool:
    """Whether a thread of the process waits in the kernel to take a name out of its cache."""
    return any(
        "fuse_reverse_inval" in (task / "wchan").read_text() for task in Path(f"/proc/{pid}/task").iterdir()
    )


def test_a_daemon_that_waits_for_a_lock_of_its_own_mount_can_be_killed(daemon, tmp_path):
    directory = tmp_path / "mnt" / "d"
    with KvcsLowLevelClient(tmp_path / "sock") as client:
        client.ll_batch_put([LLPutItem(key, b"value") for key in ("d/held", "d/other")])
        assert (directory / "other").read_bytes() == b"value"  # so the kernel knows the name
        remover = subprocess.Popen(["rm", "-f", directory / "held"], stderr=subprocess.DEVNULL)
        assert daemon.process.stdout is not None
        assert daemon.process.stdout.readline() == "held\n"
        client.ll_batch_delete(["d/other"])
    end = time.monotonic() + 10
    while not waits_for_a_lock(daemon.process.pid):
        assert time.monotonic() < end, "nothing waits for the directory's lock"
        time.sleep(0.01)
    daemon.process.kill()
    try:
        daemon.process.communicate(timeout=10)
        remover.wait(10)
    finally:
        subprocess.run(["umount", "-f", tmp_path / "mnt"], stderr=subprocess.DEVNULL, check=False)
    daemon.start()
    assert (directory / "held").read_bytes() == b"value"
    daemon.stop()
