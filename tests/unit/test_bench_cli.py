"""The command line: what is refused, in one line each, before anything runs; and SIGTERM."""

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from kvcsfs.bench import batch
from kvcsfs.bench.cli import main
from kvcsfs.bench.compare import DEFAULT_WORKS
from kvcsfs.bench.interrupts import uninterrupted
from tests.unit.bench_fake import FakeStore, fake_client

ENVIRONMENT = '{"keys": 8, "value_size": 64, "warm_up_s": 0, "duration_s": 0.01}'


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["batch", "--ops", "get,scan"], "'scan': expected names of get, put, query, delete, mixed"),
        (["batch", "--workers", "2,x"], "'x': expected a number from 1"),
        (["batch", "--json", "--csv"], "not allowed with argument"),
        (["trace", "t", "--capacity", "2 gigs"], 'expected a size such as "100GiB"'),
        (["trace", "t", "--capacity", "1GiB", "--speed", "-1"], "'-1': expected \"max\" or a number above 0"),
        (["compare", "--works", "get:4MiB"], 'expected "OP:SIZExCOUNT" such as "get:4MiBx128"'),
        (["compare", "--works", "get:4x8"], "expected values of 8 bytes or more"),
        (["compare", "--peers", "limit,disk"], "'disk': expected names of limit, kvcsfs"),
        (["compare", "--peers", "limit,limit"], "'limit,limit': expected each name once"),
        (["compare", "--data", "/none"], "'/none': expected a directory that exists"),
        (["trace", "t", "--capacity", "1GiB", "--data", "/dev/null"], "'/dev/null': expected a directory"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_a_wrong_option_is_one_line(capsys, arguments, says):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--environment", "none.json", "batch"], "none.json: can't be read: No such file or directory"),
        (["batch", "--plot", "x.pdf"], "--plot x.pdf: expected a name that ends in .png or .svg"),
        (["batch", "--plot", "none/x.png"], "none is not a directory"),
        (["batch", "--workers", "64", "--batch-sizes", "256"], "more than buffer_memory"),
        (
            ["trace", "none.jsonl", "--capacity", "1GiB"],
            "none.jsonl: can't be read: No such file or directory",
        ),
    ],
)
def test_a_wrong_request_is_one_line(capsys, monkeypatch, tmp_path, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ('{"client": {"default_deadline_s": -1}}', "client: default_deadline_s must be 0 or more seconds"),
        ('{"client": {"max_key_size": 5000}}', "client: max_key_size must be 0 (for 256) or 1 to 1024"),
        ('{"value_size": "8GiB", "buffer_memory": "1TiB"}', "client: max_value_size must be 0 (for 4194304)"),
        ('{"nodes": [{"socket": "a\\u0000b"}]}', "client: efc_socket must be the path"),
    ],
)
def test_what_no_client_takes_is_one_line(capsys, tmp_path, environment, says):
    file = tmp_path / "e.json"
    file.write_text(environment)
    assert main(["--environment", str(file), "batch", "--workers", "1", "--batch-sizes", "1"]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.fixture
def fake_matrix(monkeypatch, tmp_path):
    """The command line's own Matrix, on a store in memory."""
    store = FakeStore()
    real: Callable[..., batch.Matrix] = batch.Matrix

    def connect(*_):
        return fake_client(store)

    monkeypatch.setattr(batch, "Matrix", lambda *arguments: real(*arguments, connect))
    file = tmp_path / "e.json"
    file.write_text(ENVIRONMENT)
    return ["--environment", str(file), "batch", "--ops", "get,put", "--workers", "1,2", "--batch-sizes", "4"]


@pytest.mark.parametrize(("form", "lines"), [([], 5), (["--csv"], 5)])
def test_one_row_a_cell(capsys, fake_matrix, form, lines):
    assert main([*fake_matrix, *form]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == lines
    assert printed[0].replace(",", " ").split()[:2] == ["op", "value_size"]


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_plot(fake_matrix, tmp_path, kind):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plot.{kind}"
    assert main([*fake_matrix, "--json", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG" if kind == "png" else b"<?xml")


def test_a_plot_without_matplotlib_is_refused_before_the_run(capsys, fake_matrix, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*fake_matrix, "--plot", "x.png"]) == 2
    said = "import of matplotlib halted; None in sys.modules"
    assert (
        capsys.readouterr().err
        == f"kvcs-bench: --plot needs matplotlib: {said}; pip install 'kvcsfs[bench]'\n"
    )


def test_a_signal_waits_for_what_must_be_finished():
    done = []

    def finish():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("all")

    with pytest.raises(KeyboardInterrupt):
        finish()
    assert done == ["all"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sigterm_ends_the_command_as_an_interrupt():
    script = (
        "import os, signal, sys\n"
        "from kvcsfs.bench import cli\n"
        "cli._batch = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(cli.main(['batch']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "kvcs-bench: interrupted\n")


def test_the_help_shows_the_works_as_they_are_given(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    assert f"({DEFAULT_WORKS})" in capsys.readouterr().out
