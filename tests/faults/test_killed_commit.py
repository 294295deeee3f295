"""kill -9 at each step of a commit: the old value or the new one is there, whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import trio

from tests.faults.accounting import adds_up
from tests.stores import config, get, keys, running

pytestmark = [pytest.mark.fault, pytest.mark.usefixtures("in_threads")]

KILLED = """
import os, sys, trio
from pathlib import Path
sys.path[:0] = {path!r}
from kvcsfs.engine import engine as engine_module
from kvcsfs.engine import store
from tests import stores

async def main():
    async with stores.running(stores.config(Path({data!r}))) as engine:
        session = engine.session(0)
        await stores.put(engine, session, "kept", b"k" * 5000)
        await stores.put(engine, session, "key", b"old" * 1000)
        staged = await stores.reserve(engine, session, "key", 3000)
        stores.write(staged, b"new" * 1000)
        real, count = store.write_all, iter(range(99))
        def dying(fd, data, offset):
            step = next(count)
            if {torn} and step == {step}:
                real(fd, data[:1000], offset)
            if step == {step}:
                os.kill(os.getpid(), 9)
            real(fd, data, offset)
        store.write_all = dying
        await engine.commit_many(session, [staged.token], [stores.checksum(b"new" * 1000)])
        os.kill(os.getpid(), 9)

trio.run(main)
"""


@pytest.mark.parametrize(
    ("step", "torn", "value"),
    [
        pytest.param(0, False, b"old", id="before the footer"),
        pytest.param(0, True, b"old", id="within the footer"),
        pytest.param(1, False, b"new", id="before the old one is voided"),
        pytest.param(1, True, b"new", id="within the old footer"),
        pytest.param(2, False, b"new", id="before the old slot is recycled"),
        pytest.param(99, False, b"new", id="after the answer"),
    ],
)
async def test_killed_within_a_commit(tmp_path, step, torn, value):
    root = str(Path(__file__).parents[2])
    script = KILLED.format(path=[root], data=str(tmp_path), step=step, torn=torn)
    died = await trio.run_process([sys.executable, "-c", script], check=False, stderr=subprocess.STDOUT)
    assert died.returncode == -9
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        assert await keys(engine) == ["kept", "key"]
        assert await get(engine, session, "key") == value * 1000
        assert await get(engine, session, "kept") == b"k" * 5000
        assert await engine.verify_many(0, ["key", "kept"]) == [3000, 5000]
        adds_up(engine)
