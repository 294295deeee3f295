"""Every wrong setting is one line that names the file, the key and what was expected."""

from __future__ import annotations

import dataclasses
import grp
from pathlib import Path
from typing import Any

import pytest

from kvcsfs import config
from kvcsfs.errors import ConfigError


def load(tmp_path: Path, text: str, **flags: str) -> config.Config:
    file = tmp_path / "kvcsfs.toml"
    file.write_text(text)
    (tmp_path / "data").mkdir(exist_ok=True)
    return config.load(file, flags)


GOOD = '[[mountpoints]]\npath = "{data}"\ncapacity = "1GiB"\n'


def test_a_whole_file(tmp_path):
    (tmp_path / "other").mkdir()
    text = f"""
        [store]
        socket = "{tmp_path}/s.sock"
        socket_group = "root"
        mount = "{tmp_path}/mnt"
        backend = "pooled"
        metrics = "127.0.0.1:9477"
        [[mountpoints]]
        path = "{tmp_path}/data"
        capacity = "100GiB"
        low_watermark = "1%"
        high_watermark = 0.02
        io = "direct"
        [[mountpoints]]
        path = "{tmp_path}/other"
        capacity = 4194304
    """
    loaded = load(tmp_path, text)
    assert loaded == config.Config(
        mountpoints=(
            config.MountpointConfig(tmp_path / "data", 100 << 30, 0.01, 0.02, "direct"),
            config.MountpointConfig(tmp_path / "other", 4 << 20),
        ),
        socket=tmp_path / "s.sock",
        socket_group="root",
        mount=tmp_path / "mnt",
        backend="pooled",
        metrics="127.0.0.1:9477",
    )


def test_flags_alone(tmp_path):
    loaded = config.load(None, {"data": str(tmp_path), "capacity": "2MiB"})
    assert loaded == config.Config((config.MountpointConfig(tmp_path, 2 << 20),))
    assert str(loaded.socket) == "/var/run/kvcs/efc-grpc.sock"


def test_flags_override_the_file(tmp_path):
    text = GOOD.format(data=tmp_path / "data") + '[store]\nsocket = "/a"\nmetrics = "h:1"\n'
    (tmp_path / "flag").mkdir()
    loaded = load(
        tmp_path, text, data=str(tmp_path / "flag"), capacity="3MiB", socket="/b", mount="/m", metrics="i:2"
    )
    assert loaded.mountpoints == (config.MountpointConfig(tmp_path / "flag", 3 << 20),)
    assert (loaded.socket, loaded.mount, loaded.metrics) == (Path("/b"), Path("/m"), "i:2")


def test_relative_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = load(tmp_path, GOOD.format(data="data") + '[store]\nsocket = "run/s"\nmount = "mnt"\n')
    assert loaded.mountpoints[0].path == tmp_path / "data"
    assert (loaded.socket, loaded.mount) == (tmp_path / "run/s", tmp_path / "mnt")


def test_a_share_of_the_file_system(tmp_path):
    half = load(tmp_path, f'[[mountpoints]]\npath = "{tmp_path}"\ncapacity = "50%"').mountpoints[0].capacity
    whole = (
        load(tmp_path, f'[[mountpoints]]\npath = "{tmp_path}"\ncapacity = "100 %"').mountpoints[0].capacity
    )
    assert whole > 1 << 20
    assert abs(2 * half - whole) <= 1


def test_a_config_can_not_be_changed(tmp_path):
    loaded: Any = config.load(None, {"data": str(tmp_path), "capacity": "2MiB"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.backend = "pooled"


def _mountpoint(line: str) -> str:
    return f'[[mountpoints]]\npath = "DATA"\n{line}\n'


def _store(lines: str) -> str:
    return _mountpoint('capacity = "1GiB"') + f"[store]\n{lines}\n"


def test_owners_modes_and_places_of_the_mount(tmp_path):
    found = load(
        tmp_path,
        f"""
        [store]
        mount = "{tmp_path}/mnt"
        mount_owner = "root"
        mount_mode = "0750"
        mount_read_only = true
        [[mountpoints]]
        path = "{tmp_path}/data"
        capacity = "1GiB"
        [[prefixes]]
        prefix = "tenant-a/"
        owner = 1000
        group = "daemon"
        [[mounts]]
        path = "{tmp_path}/a"
        prefix = "tenant-a"
        read_only = true
        """,
    )
    daemon = grp.getgrnam("daemon").gr_gid
    assert found.permissions == (
        config.Permissions("", owner=0, mode=0o750),
        config.Permissions("tenant-a", owner=1000, group=daemon),
    )
    assert found.mount_read_only
    assert not found.mount_xattrs
    assert found.places == (config.Place(tmp_path / "a", "tenant-a", read_only=True),)


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("", "", "no data directory; give --data DIR"),
        ("= nonsense", "", "not valid TOML"),
        ("[sotre]", "'sotre'", "expected [store], [[mountpoints]], [[access]], [[prefixes]]"),
        ("store = 1", "store", "expected a table"),
        ("mountpoints = 1", "mountpoints", "expected [[mountpoints]] tables"),
        ("mountpoints = [1]", "mountpoints[0]", "expected a table"),
        (
            '[store]\nsokcet = "/x"',
            "store.sokcet",
            "expected one of backend, metrics, mount, mount_group",
        ),
        ('[store]\n"a\\nb" = 1', "a\\nb", "expected one of"),
        (_mountpoint('capacity = "1GiB"\nsize = 1'), "mountpoints[0].size", "expected one of capacity,"),
        ("[[mountpoints]]\ncapacity = 1", "mountpoints[0].path", "expected the backing directory"),
        ('[[mountpoints]]\npath = ""', "mountpoints[0].path", "expected a text that isn't empty"),
        ("[[mountpoints]]\npath = 5", "mountpoints[0].path", "expected a text that isn't empty"),
        (
            '[[mountpoints]]\npath = "DATA/none"',
            "mountpoints[0].path",
            "is not a directory, expected one that exists",
        ),
        (
            '[[mountpoints]]\npath = "a\\nb"',
            "mountpoints[0].path",
            "is not a directory, expected one that exists",
        ),
        (f'[[mountpoints]]\npath = "/{"x" * 300}"', "mountpoints[0].path", "is not a directory"),
        (_mountpoint(""), "mountpoints[0].capacity", 'expected a size such as "100GiB"'),
        (_mountpoint('capacity = "1GB"'), "mountpoints[0].capacity", 'expected a size such as "100GiB"'),
        (_mountpoint("capacity = true"), "mountpoints[0].capacity", 'expected a size such as "100GiB"'),
        (_mountpoint("capacity = -1"), "mountpoints[0].capacity", 'expected a size such as "100GiB"'),
        (_mountpoint("capacity = []"), "mountpoints[0].capacity", 'expected a size such as "100GiB"'),
        (_mountpoint(f'capacity = "{"9" * 400}.5TiB"'), "mountpoints[0].capacity", "expected"),
        (_mountpoint(f'capacity = "{"9" * 5000}TiB"'), "mountpoints[0].capacity", "expected"),
        (_mountpoint('capacity = "0%"'), "mountpoints[0].capacity", "more than 0% and at most 100%"),
        (_mountpoint('capacity = "101%"'), "mountpoints[0].capacity", "more than 0% and at most 100%"),
        (_mountpoint("capacity = 1000"), "mountpoints[0].capacity", "expected at least 1MiB"),
        (_mountpoint('capacity = "1GiB"\nlow_watermark = "60%"'), "low_watermark", 'from "0%" to "50%"'),
        (_mountpoint('capacity = "1GiB"\nhigh_watermark = nan'), "high_watermark", 'from "0%" to "50%"'),
        (_mountpoint('capacity = "1GiB"\nhigh_watermark = true'), "high_watermark", 'from "0%" to "50%"'),
        (_mountpoint('capacity = "1GiB"\nlow_watermark = 0.1'), "low_watermark", "is above high_watermark"),
        (
            _mountpoint('capacity = "1GiB"\nio = "mmap"'),
            "mountpoints[0].io",
            "expected 'buffered' or 'direct'",
        ),
        (
            _mountpoint('capacity = "1GiB"') + '[store]\nbackend = "s3"',
            "store.backend",
            "'direct' or 'pooled'",
        ),
        (_mountpoint('capacity = "1GiB"') + '[store]\nmount = ""', "store.mount", "expected a text"),
        (_mountpoint('capacity = "1GiB"') + "[store]\nsocket = 1", "store.socket", "expected a text"),
        (
            _mountpoint('capacity = "1GiB"') + f'[store]\nsocket = "/{"s" * 107}"',
            "store.socket",
            "at most 107 bytes",
        ),
        (
            _mountpoint('capacity = "1GiB"') + '[store]\nmetrics = "9477"',
            "store.metrics",
            "expected ADDR:PORT",
        ),
        (
            _mountpoint('capacity = "1GiB"') + '[store]\nmetrics = "h:70000"',
            "store.metrics",
            "expected ADDR:PORT",
        ),
        (_mountpoint('capacity = "1GiB"') * 2, "mountpoints[1].path", "is used twice"),
        (_store("mount_mode = 750"), "store.mount_mode", 'octal mode of directories, such as "0750"'),
        (_store('mount_owner = "nobody-of-that-name"'), "store.mount_owner", "expected a name or a number"),
        (_store("mount_group = -5"), "store.mount_group", "expected a name or a number"),
        (_store("mount_read_only = 1"), "store.mount_read_only", "expected true or false"),
        (_store("[[prefixes]]\nowner = 1"), "prefixes[0].prefix", "expected a text"),
        (_store('[[prefixes]]\nprefix = "a/b"'), "prefixes[0].prefix", "the first component of keys"),
        (_store('[[prefixes]]\nprefix = "a"\nmode = "0999"'), "prefixes[0].mode", "octal mode"),
        (_store('[[mounts]]\npath = "/x"'), "mounts", "expected store.mount"),
        (_store('mount = "/m"\n[[mounts]]\nprefix = "a"'), "mounts[0].path", "expected a text"),
    ],
)
def test_an_error_names_file_key_and_what_was_expected(tmp_path, text, key, expected):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text.replace("DATA", str(tmp_path / "data")))
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "kvcsfs.toml"))
    assert key in message
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize("value", ["0", "0.0", '"0%"'])
def test_no_room_need_be_kept(tmp_path, value):
    text = _mountpoint(f'capacity = "1GiB"\nlow_watermark = {value}').replace("DATA", str(tmp_path / "data"))
    assert load(tmp_path, text).mountpoints[0].low_watermark == 0


def test_a_file_that_can_not_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: can't be read: No such file"):
        config.load(tmp_path / "none.toml", {})
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        config.load(tmp_path, {})
    (tmp_path / "x").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not valid TOML"):
        config.load(tmp_path / "x", {})


def test_an_error_in_a_flag_names_the_command_line(tmp_path):
    with pytest.raises(ConfigError, match=r"^command line: mountpoints\[0\]\.capacity: .*--capacity SIZE"):
        config.load(None, {"data": str(tmp_path)})


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), (7, 7), ("1KiB", 1024), ("1.5 MiB", 1572864), ("100GiB", 100 << 30), (" 2TiB ", 2 << 40)],
)
def test_sizes(text, size):
    assert config.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1gib", "1G", "1e3", "-1", "1GiB/s", True, None])
def test_bad_sizes(text):
    with pytest.raises(ValueError, match="expected a size such as"):
        config.parse_size(text)


def test_sizes_for_people():
    sizes = [0, 1023, 1024, 1 << 20, 3 << 29, 1 << 50]
    assert [config.format_size(s) for s in sizes] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.0 MiB",
        "1.5 GiB",
        "1024.0 TiB",
    ]
