"""What lies in a backing directory is private, and no symbolic link in it is followed."""

from __future__ import annotations

import os
import shutil
import stat

import pytest

from kvcsfs.engine.entry import Entry
from kvcsfs.engine.store import SlotStore
from kvcsfs.errors import ConfigError
from tests.stores import config, get, keys, path_of, put, running


@pytest.fixture
def no_umask():
    old = os.umask(0)
    yield
    os.umask(old)


async def test_everything_is_private_whatever_the_umask(tmp_path, no_umask):
    settings = config(tmp_path)
    async with running(settings) as engine:
        assert await put(engine, engine.session(0), "k", b"x" * 5000) is None
    paths = list((tmp_path / "data0").rglob("*"))
    assert {p.name for p in paths} >= {"VERSION", "epoch", "slots", "snapshot"}
    assert [p for p in paths if stat.S_IMODE(p.lstat().st_mode) & 0o077] == []


@pytest.mark.parametrize("name", ["slots", "slots/ab", "epoch"])
def test_a_directory_that_is_a_link_is_refused(tmp_path, name):
    (tmp_path / "data").mkdir()
    (tmp_path / "elsewhere").mkdir()
    SlotStore(tmp_path / "data").close()
    shutil.rmtree(tmp_path / "data" / name)
    (tmp_path / "data" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=f"{name}: a symbolic link, expected a directory"):
        SlotStore(tmp_path / "data")
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_version_file_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "VERSION").symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match="can't be used as a data directory"):
        SlotStore(tmp_path / "data")
    assert not (tmp_path / "victim").exists()


async def test_a_slot_that_became_a_link_is_neither_read_nor_written(tmp_path, expected_warnings):
    expected_warnings.append("")
    victim = tmp_path / "victim"
    victim.write_bytes(b"secret" * 2000)
    async with running(config(tmp_path)) as engine:
        session = engine.session(0)
        assert await put(engine, session, "k", b"x" * 5000) is None
        (found,) = await engine.query_many(0, ["k"])
        assert isinstance(found, Entry)
        slot = path_of(tmp_path / "data0", found.slot)
        slot.unlink()
        slot.symlink_to(victim)
        opened = await engine.open_many(engine.session(1), 0, ["k"])
        assert opened.fds == []
        await engine.delete_many(0, ["k"])
    assert victim.read_bytes() == b"secret" * 2000


async def test_a_snapshot_that_is_a_link_is_not_read(tmp_path, expected_warnings):
    expected_warnings.append("not used, the footers are read instead")
    async with running(config(tmp_path)) as engine:
        assert await put(engine, engine.session(0), "k", b"x" * 5000) is None
    snapshot = tmp_path / "data0" / "snapshot"
    snapshot.rename(tmp_path / "elsewhere")
    snapshot.symlink_to(tmp_path / "elsewhere")
    async with running(config(tmp_path)) as engine:
        assert await keys(engine) == ["k"]
        assert await get(engine, engine.session(0), "k") == b"x" * 5000
    assert not snapshot.is_symlink()
