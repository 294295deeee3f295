"""The benchmark on a real daemon: each command does its work, and leaves nothing behind."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvcs import KvcsLowLevelClient
from kvcsfs.bench import compare
from kvcsfs.bench.cli import main
from kvcsfs.bench.daemon import own_daemon, running, says
from kvcsfs.bench.errors import BenchError
from kvcsfs.bench.peers.job import Work

TINY = Path(__file__).parents[1] / "data" / "tiny_trace.jsonl"


def test_a_comparison(tmp_path):
    works = [Work(op, 4096, 6) for op in ("get", "put", "query")]
    figures = compare.compare(tmp_path, works, ["limit", "kvcsfs"], turns=1, workers=2)
    assert [[row["name"] for row in work["contestants"]] for work in figures["works"]] == [
        ["limit", "kvcsfs", "kvcsfs-unverified"],
        ["limit", "kvcsfs"],
        ["kvcsfs"],
    ]
    assert not list(tmp_path.iterdir())


def test_a_trace(tmp_path, capsys):
    arguments = ["trace", str(TINY), "--capacity", "64MiB", "--value-size", "4KiB", "--data", str(tmp_path)]
    assert main([*arguments, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["of_ideal_lru"] == figures["of_belady"] == 1.0
    assert (figures["hit_rate"], figures["errors"]) == (10 / 18, 0)
    assert not list(tmp_path.iterdir())


def test_sigterm_in_the_middle_of_a_matrix_leaves_no_key(tmp_path):
    environment = tmp_path / "e.json"
    with own_daemon(tmp_path / "store", 64 << 20) as socket, KvcsLowLevelClient(socket) as client:
        settings = {"nodes": [{"socket": socket}], "keys": 4, "value_size": 4096, "duration_s": 60}
        environment.write_text(json.dumps(settings))
        # Its keys have a random part; the last call tells them.
        script = (
            "import sys\n"
            "from kvcsfs.bench import batch, cli\n"
            "fill = batch.fill\n"
            "def tell(client, dataset, buffers):\n"
            "    fill(client, dataset, buffers)\n"
            "    print(*dataset.keys, flush=True)\n"
            "batch.fill = tell\n"
            "sys.exit(cli.main(sys.argv[1:]))\n"
        )
        command = [
            sys.executable,
            "-c",
            script,
            "--environment",
            str(environment),
            "batch",
            "--batch-sizes",
            "2",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout
            keys = process.stdout.readline().split()
            assert [r.status for r in client.ll_batch_query(keys)] == ["ok"] * 4
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate()
        assert (process.returncode, errors) == (130, "kvcs-bench: interrupted\n")
        assert [r.status for r in client.ll_batch_query(keys)] == ["not_found"] * 4


def test_a_server_that_does_not_start_is_told_by_its_last_line():
    command = [sys.executable, "-c", "import sys; sys.exit('first\\nno room')"]
    with pytest.raises(BenchError, match="did not start: no room"), running(command, says("ready")):
        pass
