"""kill -9 at every named point, and what the next start finds."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvcsfs.config import Config, MountpointConfig
from kvcsfs.engine.faults import POINTS
from tests.faults.record import Record, version_of
from tests.faults.workload import CAPACITY, NAMES
from tests.stores import bytes_on_disk, get, put, running

pytestmark = pytest.mark.fault

ROOT = Path(__file__).resolve().parents[2]
TURNS = int(os.environ.get("KVCSFS_TURNS", "1"))  # kills at each point, at different passes
OPERATIONS = 1000  # of a life that a point ends: some are passed now and then only
RARE = ("epoch.made", "epoch.synced", "recovery.read")  # passed once a life


def live(
    directory: Path, seed: int, operations: int, fault: str = "", durability: str = "none", kill: str = ""
) -> subprocess.CompletedProcess[bytes]:
    """One life of the workload on the store of a directory."""
    script = [sys.executable, "-m", "tests.faults.workload", directory / "data", directory / "log"]
    faults = {"KVCSFS_FAULT": fault, "WORKLOAD_DURABILITY": durability, "WORKLOAD_KILL": kill}
    return subprocess.run(
        [*script, str(seed), str(operations)],
        env={**os.environ, **faults, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,
    )


async def examine(directory: Path) -> None:
    """Start the store again: what was acknowledged is there, nothing else is, and every byte is counted."""
    record = Record(directory / "log")
    async with running(Config((MountpointConfig(directory / "data", CAPACITY, 0.0, 0.0),))) as engine:
        catalog = engine.volumes[0].catalog
        assert catalog.ledger.used == catalog.ledger.committed == bytes_on_disk(directory / "data")
        here = [e.key for e in catalog.lru]
        assert any([k for k in here if k in order] == order for order in record.orders), record.orders
        session = engine.session(0)
        for key in NAMES:
            value = await get(engine, session, key)
            version = None if value is None else version_of(value)
            assert version in record.allowed.get(key, {None}), (key, version, record.allowed.get(key))
        for key in NAMES:  # and it is a store that works
            assert await put(engine, session, f"new/{key}", b"x" * 9000) is None
        assert catalog.ledger.used <= CAPACITY
        assert bytes_on_disk(directory / "data") == catalog.ledger.used
        await engine.close_session(session)


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that has seen use and was killed: a start has something to recover."""
    directory: Path = tmp_path_factory.mktemp("crashed")
    (directory / "data").mkdir()
    done = live(directory, 7, 200, "commit.sealed:150")
    assert done.returncode == -signal.SIGKILL, done.stderr
    return directory


async def test_the_store_that_the_others_begin_with(crashed, tmp_path):
    shutil.copytree(crashed, tmp_path / "copy")
    await examine(tmp_path / "copy")


@pytest.mark.parametrize("number", range(1, 1 + 5 * TURNS))
@pytest.mark.parametrize("what", ["acknowledged", "written"])
async def test_killed_when_an_operation_is(what, number, crashed, tmp_path):
    directory = tmp_path / "copy"
    shutil.copytree(crashed, directory)
    done = live(directory, number, 150, kill=f"{what}:{number * 11 // TURNS}")
    assert done.returncode == -signal.SIGKILL, done.stderr
    await examine(directory)


@pytest.mark.parametrize("turn", range(TURNS))
@pytest.mark.parametrize("point", POINTS)
async def test_killed_at(point, turn, crashed, tmp_path):
    directory = tmp_path / "copy"
    shutil.copytree(crashed, directory)
    seed = POINTS.index(point) * 1000 + turn
    number = 1 if point in RARE else random.Random(seed).randint(1, 4)
    durability = "fsync" if point == "commit.synced" or turn % 2 else "none"
    done = live(directory, seed, OPERATIONS, f"{point}:{number}", durability)
    assert done.returncode == -signal.SIGKILL, f"never passed: {done.stderr.decode()}"
    await examine(directory)


async def test_a_life_that_nothing_ends(crashed, tmp_path):
    directory = tmp_path / "copy"
    shutil.copytree(crashed, directory)
    done = live(directory, 1, 300)
    assert (done.returncode, done.stderr) == (0, b"")
    record = Record(directory / "log")
    assert record.ended
    assert all(len(versions) == 1 for versions in record.allowed.values())


def test_a_point_that_is_not_one_is_told(tmp_path):
    done = live(tmp_path, 1, 1, "commit.seald:1")
    assert b"KVCSFS_FAULT: 'commit.seald:1': expected POINT:N" in done.stderr


def test_each_point_is_documented():
    text = (ROOT / "docs" / "recovery.md").read_text()
    assert [point for point in POINTS if f"`{point}`" not in text] == []
