"""The units in systemd/ under a real systemd, with the real daemon: what `systemctl` promises is true."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.systemd import container
from tests.systemd.container import Container, until

pytestmark = [
    pytest.mark.systemd,
    pytest.mark.skipif(bool(container.missing()), reason=f"no systemd here: {container.missing()}"),
]

SOCKET = "/var/run/kvcs/efc-grpc.sock"
MOUNT = "/mnt/kvcs"


def configuration(name: str = "", capacity: str = "64MiB", more: str = "") -> str:
    """What an administrator writes for the one store, or for `kvcsfs@NAME`."""
    socket = f"/var/run/kvcs/{name}.sock" if name else SOCKET
    suffix = f"-{name}" if name else ""
    return (
        f'[store]\nsocket = "{socket}"\nmount = "{MOUNT}{suffix}"\n{more}'
        f'[[mountpoints]]\npath = "/var/lib/kvcs{suffix}"\ncapacity = "{capacity}"\n'
    )


@pytest.fixture(scope="module")
def booted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    with Container(tmp_path_factory.mktemp("systemd")) as machine:
        yield machine


@pytest.fixture
def machine(booted: Container) -> Iterator[Container]:
    """The container with the store configured and its unit stopped."""
    booted.write("/etc/kvcsfs/kvcsfs.toml", configuration())
    yield booted
    booted.run("systemctl", "stop", "kvcsfs")
    booted.run("systemctl", "reset-failed", check=False)


def recovered(machine: Container, killed: str) -> str:
    """Wait until systemd has another daemon in place of one, ready; its number."""

    def look() -> str:
        number = machine.show("kvcsfs", "MainPID")
        ready = machine.show("kvcsfs", "ActiveState") == "active"
        return number if ready and number not in ("0", killed) else ""

    return until(look)


def of_process(machine: Container, name: str) -> str:
    """The first word of a field in /proc/PID/status of the daemon."""
    status = machine.sh(f"cat /proc/{machine.show('kvcsfs', 'MainPID')}/status")
    return next(line.split()[1] for line in status.splitlines() if line.startswith(f"{name}:"))


def kill(machine: Container) -> str:
    """End the daemon as the kernel would; its number."""
    number = machine.show("kvcsfs", "MainPID")
    assert int(number) > 1
    machine.sh(f"kill -9 {number}")
    return number


def test_after_start_both_faces_answer_and_after_stop_nothing_is_left(machine: Container):
    machine.run("systemctl", "start", "kvcsfs")
    assert machine.mounts(MOUNT) == 1, "seen by those outside of the unit"
    assert machine.status(SOCKET)["mountpoints"][0]["state"] == "ready"
    machine.sh(f"echo value >{MOUNT}/key")
    assert machine.show("kvcsfs", "StatusText") == f"serving, socket={SOCKET} mount={MOUNT}"
    machine.run("systemctl", "stop", "kvcsfs")
    assert machine.mounts(MOUNT) == 0
    assert not machine.sh(f"ls {SOCKET}", check=False)
    assert [machine.show("kvcsfs", p) for p in ("ActiveState", "Result")] == ["inactive", "success"]
    machine.run("systemctl", "start", "kvcsfs")
    assert machine.sh(f"cat {MOUNT}/key") == "value\n"


def test_the_daemon_has_a_user_of_its_own_and_its_files_are_private(machine: Container):
    machine.run("systemctl", "start", "kvcsfs")
    machine.sh(f"echo value >{MOUNT}/key")
    assert of_process(machine, "Uid") == machine.sh("id -u kvcsfs").strip()
    assert of_process(machine, "CapEff") == "0000000000200000", "CAP_SYS_ADMIN alone"
    assert machine.sh("find /var/lib/kvcs/ -perm /077") == ""
    assert machine.sh("find /var/lib/kvcs/ ! -user kvcsfs") == ""
    assert machine.sh(f"stat -c '%a %U %G' {SOCKET}") == "660 kvcsfs kvcsfs\n"


def test_a_killed_daemon_comes_back_with_its_values_and_one_mount(machine: Container):
    machine.run("systemctl", "start", "kvcsfs")
    machine.sh(f"echo value >{MOUNT}/key")
    machine.sh(f"cd {MOUNT} && exec 3<key && sleep 300 >/dev/null 2>&1 & echo $! >/run/sitting")
    recovered(machine, kill(machine))
    assert machine.mounts(MOUNT) == 1
    assert machine.sh(f"cat {MOUNT}/key") == "value\n"
    assert machine.show("kvcsfs", "NRestarts") == "1"
    machine.sh("kill $(cat /run/sitting)")


def test_a_mount_that_someone_else_left_dead_is_cleared(machine: Container):
    machine.sh(f"mkdir -p /var/lib/other {MOUNT}")
    other = "/opt/kvcsfs/bin/kvcsfs serve --data /var/lib/other --capacity 64MiB --socket /run/other"
    machine.sh(f"{other} --mount {MOUNT} >/run/other.out 2>&1 & echo $! >/run/other.pid")
    until(lambda: "ready" in machine.sh("cat /run/other.out"))
    machine.sh("kill -9 $(cat /run/other.pid)")
    assert machine.run("ls", MOUNT, check=False).returncode == 2
    machine.run("systemctl", "start", "kvcsfs")
    assert machine.mounts(MOUNT) == 1
    machine.sh(f"ls {MOUNT}")


def test_a_stop_while_a_program_sits_in_the_mount(machine: Container):
    machine.run("systemctl", "start", "kvcsfs")
    machine.sh(f"echo value >{MOUNT}/key")
    machine.sh(f"cd {MOUNT} && exec 3<key && sleep 300 >/dev/null 2>&1 & echo $! >/run/sitting")
    machine.run("systemctl", "stop", "kvcsfs")
    assert machine.mounts(MOUNT) == 0
    assert machine.show("kvcsfs", "Result") == "success"
    machine.sh("kill $(cat /run/sitting)")


def test_a_second_store_beside_it(machine: Container):
    machine.write("/etc/kvcsfs/two.toml", configuration("two"))
    machine.run("systemctl", "start", "kvcsfs", "kvcsfs@two")
    machine.sh(f"echo one >{MOUNT}/only-one; echo two >{MOUNT}-two/only-two")
    assert machine.sh(f"ls {MOUNT}-two") == "only-two\n"
    machine.run("systemctl", "stop", "kvcsfs")
    assert machine.sh(f"cat {MOUNT}-two/only-two") == "two\n"
    assert machine.status("/var/run/kvcs/two.sock")["mountpoints"][0]["entries"] == 1
    machine.run("systemctl", "stop", "kvcsfs@two")
    assert machine.mounts(f"{MOUNT}-two") == 0


def reload(machine: Container, text: str) -> str:
    """Change the configuration, reload, and return what the daemon says of it."""
    machine.write("/etc/kvcsfs/kvcsfs.toml", text)
    before = machine.show("kvcsfs", "StatusText")
    machine.run("systemctl", "reload", "kvcsfs")
    return until(lambda: machine.show("kvcsfs", "StatusText").removeprefix(before))


def test_reload_takes_the_capacity_without_a_restart(machine: Container):
    machine.run("systemctl", "start", "kvcsfs")
    number = machine.show("kvcsfs", "MainPID")
    machine.sh(f"for i in $(seq 40); do head -c 1000000 /dev/urandom >{MOUNT}/$i; done")
    assert reload(machine, configuration(capacity="16MiB")) == "configuration reloaded"
    figures = until(lambda: (f := machine.status(SOCKET)["mountpoints"][0])["used_bytes"] <= 16 << 20 and f)
    assert figures["capacity_bytes"] == 16 << 20
    assert machine.sh(f"df --output=size -B1M {MOUNT}").split()[-1] == "16"
    assert machine.show("kvcsfs", "MainPID") == number
    assert machine.show("kvcsfs", "ActiveState") == "active"


def test_reload_of_what_can_not_change_or_is_wrong_changes_nothing(machine: Container):
    machine.run("systemctl", "start", "kvcsfs")
    said = reload(machine, configuration(capacity="16MiB").replace(SOCKET, "/var/run/kvcs/new.sock"))
    assert said == "not reloaded: store.socket can't change without a restart; nothing was reloaded"
    assert "capacity" in reload(machine, configuration(capacity="a lot"))
    assert machine.status(SOCKET)["mountpoints"][0]["capacity_bytes"] == 64 << 20


def test_a_refused_configuration_fails_once_with_one_line(machine: Container):
    machine.write("/etc/kvcsfs/kvcsfs.toml", configuration(capacity="a lot"))
    with pytest.raises(AssertionError, match="failed"):
        machine.run("systemctl", "start", "kvcsfs")
    assert [machine.show("kvcsfs", p) for p in ("ExecMainStatus", "NRestarts")] == ["2", "0"]
    said = machine.journal("kvcsfs").splitlines()[-6:]
    assert sum("a lot" in line for line in said) == 1
    assert any(
        s.startswith("kvcsfs: /etc/kvcsfs/kvcsfs.toml: mountpoints[0].capacity: expected") for s in said
    )


def exposure(machine: Container) -> str:
    done = machine.run("systemd-analyze", "security", "--no-pager", "kvcsfs.service")
    (figure,) = re.findall(r"Overall exposure level for kvcsfs.service: (\S+)", done.stdout)
    return str(figure)


SANDBOX = Path(__file__).resolve().parents[2] / "systemd" / "socket-only.conf"


def test_the_hardening_figures_are_those_of_the_document(machine: Container):
    text = (container.ROOT / "docs" / "security.md").read_text()
    found = re.search(r"`systemd-analyze security`: \*\*(\S+)\*\*.*\*\*(\S+)\*\*", text, re.DOTALL)
    figures = [exposure(machine)]
    machine.write("/etc/systemd/system/kvcsfs.service.d/socket-only.conf", SANDBOX.read_text())
    machine.run("systemctl", "daemon-reload")
    try:
        figures.append(exposure(machine))
        # The interpreter of this test may lie in a home directory or below /tmp; a package's doesn't.
        machine.write(
            "/etc/systemd/system/kvcsfs.service.d/test.conf", "[Service]\nProtectHome=no\nPrivateTmp=no\n"
        )
        machine.run("systemctl", "daemon-reload")
        machine.write("/etc/kvcsfs/kvcsfs.toml", configuration().replace(f'mount = "{MOUNT}"\n', ""))
        machine.run("systemctl", "start", "kvcsfs")
        assert machine.status(SOCKET)["mountpoints"][0]["state"] == "ready"
        assert of_process(machine, "CapEff") == "0" * 16
        machine.run("systemctl", "stop", "kvcsfs")
    finally:
        machine.sh("rm -r /etc/systemd/system/kvcsfs.service.d")
        machine.run("systemctl", "daemon-reload")
    assert found is not None
    assert [float(f) for f in found.groups()] == [float(f) for f in figures]


def test_nothing_of_the_container_is_seen_by_the_host(machine: Container):
    mounts = subprocess.run(["cat", "/proc/self/mounts"], capture_output=True, text=True, check=True).stdout
    assert "kvcsfs-test" not in mounts
