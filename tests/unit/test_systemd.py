"""The units and the example configuration that ship in systemd/."""

import configparser
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from kvcsfs import config

SYSTEMD = Path(__file__).resolve().parents[2] / "systemd"
UNITS = ("kvcsfs.service", "kvcsfs@.service")

# Each was tried on a FUSE service: with these it starts, but only the service itself sees the mount; or can't mount.
HIDES_THE_MOUNT = {
    "PrivateTmp", "ProtectSystem", "PrivateMounts", "ProtectKernelTunables", "ProtectKernelModules",
    "ProtectKernelLogs", "ProtectControlGroups", "ProtectProc", "ProcSubset", "ReadWritePaths", "ReadOnlyPaths",
    "InaccessiblePaths", "TemporaryFileSystem", "PrivateDevices", "PrivateUsers", "DynamicUser",
}  # fmt: skip


def service_of(unit: str) -> list[tuple[str, str]]:
    """The settings of a unit's [Service] section, in order; systemd permits one several times."""
    section = (SYSTEMD / unit).read_text().partition("[Service]\n")[2].partition("\n[")[0]
    lines = [line for line in section.splitlines() if line and not line.startswith("#")]
    return [(key, value) for key, _, value in (line.partition("=") for line in lines)]


def shell_of(unit: str, setting: str, configuration: Path) -> str:
    """The script that `setting` gives to /bin/sh, as systemd passes it on (systemd.service(5), COMMAND LINES)."""
    value = dict(service_of(unit))[setting].replace("/etc/kvcsfs/%i.toml", "/etc/kvcsfs/kvcsfs.toml")
    program, dash_c, script = shlex.split(value)
    assert (program.lstrip("-+"), dash_c) == ("/bin/sh", "-c")
    script = script.replace("\\\\", "\\").replace("$$", "$")
    return script.replace("/etc/kvcsfs/kvcsfs.toml", str(configuration))


def test_the_example_configuration_is_accepted(tmp_path: Path):
    text = (SYSTEMD / "kvcsfs.toml").read_text()
    file = tmp_path / "kvcsfs.toml"
    # Settings that are commented out must be right too, so that removing the `#` is enough.
    file.write_text(
        re.sub(r"^# (\w+ = |\[\[)", r"\1", text, flags=re.MULTILINE).replace("/var/lib/kvcs", str(tmp_path))
    )
    loaded = config.load(file, {})
    assert str(loaded.mount) == "/mnt/kvcs"
    assert str(loaded.socket) == config.DEFAULT_SOCKET
    assert loaded.mountpoints[0].capacity == 100 << 30
    assert loaded.access == (config.AccessRule("team-a/", frozenset({0, 61001}), frozenset({0})),)
    assert loaded.permissions[1] == config.Permissions("tenant-a", 61001, 0, 0o2750)
    assert loaded.places[0].prefix == "tenant-a"
    assert loaded.mountpoints[0].low_watermark == config.MountpointConfig.low_watermark
    assert loaded.mountpoints[0].high_watermark == config.MountpointConfig.high_watermark


def test_the_example_configuration_shows_every_setting():
    text = (SYSTEMD / "kvcsfs.toml").read_text()
    shown = set(re.findall(r"^(?:# )?(\w+) = ", text, flags=re.MULTILINE))
    document = tomllib.loads(text)
    assert set(document) == {"store", "mountpoints"}
    settings = config._STORE_KEYS | config._MOUNTPOINT_KEYS | config._ACCESS_KEYS
    assert shown == settings | config._PREFIX_KEYS | config._PLACE_KEYS


@pytest.mark.parametrize("unit", UNITS)
def test_no_unit_hides_the_mount_or_keeps_it_from_mounting(unit: str):
    assert {key for key, _ in service_of(unit)} & HIDES_THE_MOUNT == set()


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("setting", ["ExecStartPre", "ExecStopPost"])
def test_the_clearing_reads_the_mount_from_the_configuration(unit: str, setting: str, tmp_path: Path):
    mount, file = tmp_path / "mnt", tmp_path / "kvcsfs.toml"
    file.write_text(f'[store]\nsocket = "/a"\nmount = "{mount}"\n')
    script = shell_of(unit, setting, file)
    done = subprocess.run(
        ["/bin/sh", "-ec", f"{script}; echo $m"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(mount)
    assert mount.is_dir() == (setting == "ExecStartPre")


@pytest.mark.parametrize("unit", UNITS)
def test_a_store_without_a_mount_clears_nothing(unit: str, tmp_path: Path):
    file = tmp_path / "kvcsfs.toml"
    file.write_text('[store]\n# mount = "/mnt/kvcs"\n')
    subprocess.run(["/bin/sh", "-ec", shell_of(unit, "ExecStartPre", file)], check=True)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze isn't installed")
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_accepts_the_unit(unit: str, tmp_path: Path):
    text = (SYSTEMD / unit).read_text().replace("/opt/kvcsfs/bin/kvcsfs", "/bin/true")
    copy = tmp_path / unit.replace("@", "@one")
    copy.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_units_are_the_same_but_for_the_instance():
    parsers = []
    for unit in UNITS:
        parser = configparser.ConfigParser(strict=False, interpolation=None)
        parser.read(SYSTEMD / unit)
        parsers.append(parser)
    one, many = ({k: v.replace("%i", "kvcsfs") for k, v in p["Service"].items()} for p in parsers)
    assert one.pop("statedirectory") == "kvcs"
    assert many.pop("statedirectory") == "kvcs-kvcsfs"
    assert one == many
