"""The `kvcsfs` command: every error is one line with status 1 or 2, and a daemon that it starts and asks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcsfs import cli, wire
from tests.rawclient import RawClient
from tests.stores import checksum

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "PYTHONDEVMODE": "1"}


def command(
    *arguments: str | bytes, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "kvcsfs.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        env=ENVIRONMENT | (environment or {}),
        check=False,
    )


def refused(result: subprocess.CompletedProcess[str], status: int, *said: str) -> None:
    """One line on stderr, nothing on stdout."""
    assert result.returncode == status, result
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("kvcsfs: ")
    assert all(s in line for s in said), line


class Daemon:
    """A daemon of its own in a directory; it has said that it is ready."""

    def __init__(self, path: Path, *arguments: str) -> None:
        self.socket = str(path / "run" / "sock")
        self.data = path / "data"
        self.data.mkdir(exist_ok=True)
        flags = ["--data", str(self.data), "--capacity", "8MiB", "--socket", self.socket, *arguments]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvcsfs.cli", "serve", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()

    def client(self) -> RawClient:
        """A client, once the entries that were there are known: only then is a put taken."""
        client = RawClient(Path(self.socket))
        while client.status()["state"] != "ready":
            time.sleep(0.01)
        return client

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """End it; the exit status, and what it logged."""
        self.process.send_signal(number)
        _, log = self.process.communicate(timeout=30)
        return self.process.returncode, log

    def ask(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return command(name, "--socket", self.socket, *arguments)


@contextmanager
def daemon(path: Path, *arguments: str) -> Iterator[Daemon]:
    """A daemon that is ended with the test, and whose log has no traceback."""
    running = Daemon(path, *arguments)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            _, log = running.stop()
            assert "Traceback" not in log
        for stream in (running.process.stdout, running.process.stderr):
            assert stream is not None
            stream.close()


# -- without a daemon


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["status", "--fast"], "unrecognized arguments: --fast"),
        (["ls", "--mountpoint", "x"], "invalid int value: 'x'"),
        (["evict"], "expected PREFIX, --bytes SIZE or --all"),
        (["evict", "--bytes", "lots"], "expected a size such as"),
        (["evict", "a", "--bytes", "0"], "expected at least 1 byte"),
        (["rm"], "expected keys, or --prefix PREFIX"),
        (["rm", "a", "--prefix", "b"], "expected keys, or --prefix PREFIX"),
        (["serve"], "no data directory; give --data DIR"),
        (["serve", "--data", "/none"], "/none is not a directory"),
        (["serve", "--data", "/tmp"], "expected a size such as"),
        (["serve", "--config", "/none.toml"], "/none.toml: can't be read: No such file"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(arguments, said, capsys):
    try:
        status: object = cli.main(arguments)
    except SystemExit as exc:
        status = exc.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("kvcsfs: ")
    assert said in line


@pytest.mark.parametrize("arguments", [["status"], ["usage"], ["ls"], ["rm", "k"], ["evict", "--all"]])
def test_no_daemon_is_one_line_and_status_1(tmp_path, arguments):
    path = str(tmp_path / "sock")
    refused(
        command(*arguments, environment={"KVCS_SOCKET": path}),
        1,
        f"no daemon answers at {path}",
        "No such file",
    )


@pytest.mark.parametrize("path", ["", "x" * 300, "/etc/passwd", "/tmp"])
def test_a_socket_path_that_can_not_be_one(path):
    refused(command("status", "--socket", path), 1, "no daemon answers at")


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["serve", "--help"], ["ls", "--help"]])
def test_help_and_version(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 0
    assert "kvcsfs" in capsys.readouterr().out


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n", bytes(wire.encode(wire.QueryReply(1, [0])))]
)
def test_something_else_at_the_socket(tmp_path, answer):
    path = str(tmp_path / "sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(100)
                client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        refused(command("status", "--socket", path), 1)
        thread.join()


# -- with one


def test_serve_ask_stop_and_start_again(tmp_path):
    with daemon(tmp_path) as d:
        assert d.ready == f"kvcsfs ready socket={d.socket}\n"
        with d.client() as client:
            for i in range(3):
                assert client.put(f"m/{i}", b"x" * 5000) == 0
            assert client.put("other\n", b"y") == 0
        assert d.ask("status").stdout.splitlines()[0].startswith("kvcsfs ")
        status = json.loads(d.ask("status", "--json").stdout)
        assert status["mountpoints"][0]["entries"] == 4
        usage = {"prefix": "m/", "entries": 3, "value_bytes": 15000, "charged_bytes": 36864}
        assert json.loads(d.ask("usage", "m/", "--json").stdout) == usage
        assert (
            d.ask("usage", "m/").stdout
            == "3 entries, 14.6 KiB of values, 36.0 KiB with padding and footers\n"
        )
        rows = [json.loads(line) for line in d.ask("ls", "--json").stdout.splitlines()]
        assert [(r["key"], r["size"]) for r in rows] == [
            ("m/0", 5000),
            ("m/1", 5000),
            ("m/2", 5000),
            ("other\n", 1),
        ]
        assert rows[0]["checksum"] == checksum(b"x" * 5000).hex()
        assert d.ask("ls", "other").stdout.endswith(" other\\n\n")
        assert d.ask("rm", "m/0").returncode == 0
        refused(d.ask("rm", "m/0", "m/1", "none"), 1, "no value under m/0 and 1 others")
        assert d.ask("evict", "other").stdout == "evicted 1 entries, 8.0 KiB\n"
        assert d.stop() == (0, log_of(d))
        assert not Path(d.socket).exists()
    with daemon(tmp_path) as d, d.client():
        assert d.ask("ls", "m").stdout.endswith(" m/2\n")
        assert d.ask("rm", "--prefix", "m").stdout == "deleted 1 entries, 12.0 KiB\n"
        assert d.stop(signal.SIGINT)[0] == 0


def log_of(d: Daemon) -> str:
    """All that a daemon on an empty directory logs in a quiet life."""
    return f"INFO kvcsfs.engine.volumes: {d.data}: 0 entries\nINFO kvcsfs.daemon: stopping on SIGTERM\n"


def test_after_a_kill_everything_committed_is_there(tmp_path):
    with daemon(tmp_path) as d:
        with d.client() as client:
            assert client.put("k", b"x" * 5000) == 0
            (reply,), (fds,) = client.reserve(["staged"], [5000])
            os.close(fds[0])
            assert reply.tokens == [2]
            assert d.stop(signal.SIGKILL)[0] == -9
        assert Path(d.socket).exists()
    with daemon(tmp_path) as d, d.client() as client:
        assert client.get("k") == b"x" * 5000
        assert [line.split()[-1] for line in d.ask("ls").stdout.splitlines()] == ["k"]


def test_a_second_daemon_is_refused(tmp_path):
    (tmp_path / "b").mkdir()
    with daemon(tmp_path) as d:
        flags = ["serve", "--capacity", "8MiB"]
        same_data = command(*flags, "--data", str(d.data), "--socket", str(tmp_path / "other"))
        refused(same_data, 2, f"{d.data}: in use by another kvcsfs daemon")
        assert not (tmp_path / "other").exists()
        same_socket = command(*flags, "--data", str(tmp_path / "b"), "--socket", d.socket)
        assert same_socket.returncode == 2
        assert "Traceback" not in same_socket.stderr
        assert "a daemon answers there already" in same_socket.stderr.splitlines()[-1]
        assert d.ask("status").returncode == 0


def test_a_metrics_address_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = ["--data", str(tmp_path), "--capacity", "8MiB", "--socket", str(tmp_path / "sock")]
        result = command("serve", *flags, "--metrics", address)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert f"kvcsfs: metrics: can't listen at {address}: Address already in use" in result.stderr


def test_a_mount_without_the_systems_library(tmp_path):
    gone = "libfuse3.so.3: cannot open shared object file"
    (tmp_path / "pyfuse3.py").write_text(f"raise ImportError({gone!r})")
    flags = ["--data", str(tmp_path), "--capacity", "8MiB", "--socket", str(tmp_path / "sock")]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    result = command("serve", *flags, "--mount", str(tmp_path / "mnt"), environment={"PYTHONPATH": path})
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert f"kvcsfs: mount: {gone}; expected pyfuse3 and libfuse3" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rm", b"\xff"], "the key isn't UTF-8"),
        (["usage", b"\xff"], "the key isn't UTF-8"),
        (["ls", "--mountpoint", "99999999999999999999999"], "64 bits"),
        (["rm", "k" * 2000], "no value under"),
        (["evict", "--bytes", "99999999999999TiB"], "64 bits"),
    ],
)
def test_what_no_daemon_can_do_is_one_line(tmp_path, arguments, said):
    with daemon(tmp_path) as d:
        name, *rest = arguments
        refused(command(name, "--socket", d.socket, *rest), 1, said)


def test_an_output_that_takes_nothing_is_one_line(tmp_path):
    size = [sys.executable, "-m", "kvcsfs.cli", "size", "--layers", "1", "--latent", "1"]
    full = subprocess.run(
        ["bash", "-c", '"$@" > /dev/full', "-", *size],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )
    refused(full, 1, "No space left on device")
    closed = subprocess.run(
        ["bash", "-c", '"$@" >&-', "-", *size], capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    assert (closed.returncode, closed.stderr) == (0, "")


def test_a_key_that_the_terminal_can_not_show_is_listed(tmp_path):
    with daemon(tmp_path) as d, d.client() as client:
        assert client.put("ключ", b"v") == 0
        listed = command("ls", "--socket", d.socket, environment={"PYTHONIOENCODING": "ascii"})
        assert listed.stdout.endswith(r" \u043a\u043b\u044e\u0447" + "\n")


def test_a_reader_that_has_enough_ends_the_command_quietly(tmp_path):
    with daemon(tmp_path) as running:
        script = f"{sys.executable} -m kvcsfs.cli status --json --socket {running.socket} | true"
        result = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, timeout=30, env=ENVIRONMENT, check=False
        )
        assert result.stderr == ""


def test_the_commands_leave_the_signals_of_their_process_alone(capsys):
    """With the default action a socket that its client left would kill the daemon."""
    before = signal.getsignal(signal.SIGPIPE)
    assert cli.main(["status", "--socket", "/nonexistent/sock"]) == 1
    assert signal.getsignal(signal.SIGPIPE) == before == signal.SIG_IGN
