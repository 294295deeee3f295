"""What all connectors share: keys, settings, jobs, and a store that never raises."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvcsfs.connectors.jobs import Jobs
from kvcsfs.connectors.keys import KeySpace, block_hashes, component, leading_run, prefix_hashes
from kvcsfs.connectors.memory import view_of
from kvcsfs.connectors.settings import Settings
from kvcsfs.connectors.store import Store
from tests.connectors.fakes.torch import FLOAT16, Tensor
from tests.engines.daemon import Daemon

TOKENS = list(range(1000, 1100))
ENGINES = ("lmcache", "lmcache_l2", "sglang", "transformers", "vllm")


# -- keys


def test_a_block_is_named_by_all_tokens_up_to_its_end():
    names = block_hashes(TOKENS, 16)
    assert len(names) == len(set(names)) == 100 // 16
    assert block_hashes(TOKENS[:40], 16) == names[:2]
    assert block_hashes([7, *TOKENS[1:]], 16)[5] != names[5]
    assert not set(block_hashes(TOKENS, 16, "tenant")) & set(names)
    assert not set(block_hashes(TOKENS, 32)) & set(names)


def test_block_names_are_the_same_in_every_process_and_release():
    # Computed once and written down: stored caches are lost when these change.
    assert block_hashes([1, 2, 3, 4], 2) == [
        "1013bf7ec417b0f4528876aae1097ba71b087bc32bea51a10b61be1cced60122",
        "e63339fedc52d98dc90e0734533bb6e2f341c662a9fbcc21499bf5b77efe96b6",
    ]
    assert (
        prefix_hashes([1, 2, 3, 4], [2])[0]
        == "0a07cded964694db0643eb90433fe5a3aaeeedfc6b4840e7aa499af120ad1b6d"
    )


def test_a_prefix_is_named_by_its_tokens():
    assert prefix_hashes(TOKENS, [10, 20, 100])[:2] == prefix_hashes(TOKENS[:20], [10, 20])
    assert len(set(prefix_hashes(TOKENS, range(101)))) == 101


@pytest.mark.parametrize("tokens", [[-1], [1 << 32]])
def test_a_token_that_is_none_is_refused(tokens):
    with pytest.raises(struct.error):
        block_hashes(tokens, 1)


def test_different_texts_are_different_components():
    texts = [
        "",
        ".",
        "..",
        ".x",
        "~2ex",
        "a/b",
        "a-b",
        "a~2fb",
        "a b",
        "ä",
        "a" * 121,
        "a" * 122,
        "a" * 120,
        "~",
    ]
    parts = [component(text) for text in texts]
    assert len(set(parts)) == len(texts)
    for part in parts:
        assert part.isascii() and "/" not in part and part[0] != "." and 0 < len(part) <= 120
    assert component("Llama-3.1_8B") == "Llama-3.1_8B"


def test_every_part_of_a_key_space_matters():
    base = {"model": "m", "version": "1", "engine": "e", "dtype": "bf16", "layout": "l", "rank": "r"}
    spaces = [KeySpace(**base), *(KeySpace(**base | {name: base[name] + "x"}) for name in base)]
    assert len({space.key("block") for space in spaces}) == 7
    assert spaces[0].key("block") == "m/1/e/bf16/l/r/block"
    assert spaces[0].engine_prefix == "m/1/e/"
    with pytest.raises(ValueError, match="no name"):
        KeySpace(**base | {"model": ""})


def test_the_leading_run_ends_at_the_first_miss():
    assert [leading_run(hits) for hits in ([], [False, True], [True, True, False, True])] == [0, 0, 2]


# -- settings


def test_settings_are_read_by_prefix():
    given = {"kvcs.socket": "/s", "kvcs.deadline_s": 2, "kvcs.queue_items": 5, "other": 1}
    assert Settings.take(given, "kvcs.") == Settings(socket="/s", deadline_s=2.0, queue_items=5)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("sockt", "/s", "unknown option 'kvcs.sockt', expected one of kvcs.socket"),
        ("deadline_s", "5", "kvcs.deadline_s must be a number, 0 or more, not '5'"),
        ("queue_items", True, "kvcs.queue_items must be a whole number"),
        ("queue_items", -1, "kvcs.queue_items must be a whole number, 0 or more, not -1"),
        ("verify_reads", 1, "kvcs.verify_reads must be true or false"),
        ("socket", None, "kvcs.socket must be a text"),
    ],
)
def test_a_wrong_setting_is_refused_with_what_would_be_right(name, value, said):
    with pytest.raises(ValueError, match=said):
        Settings.take({f"kvcs.{name}": value}, "kvcs.")


# -- engines


@pytest.mark.parametrize("module", ENGINES)
def test_a_connector_without_its_engine_says_which_package_is_missing(module):
    script = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('lmcache', 'sglang', 'torch', 'transformers', 'vllm'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import kvcsfs.connectors\n"
        f"import kvcsfs.connectors.{module}\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    package = {"lmcache_l2": "lmcache", "transformers": "torch"}.get(module, module)
    said = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode == 1
    assert said.startswith(f"ImportError: this connector needs {package}")


def test_importing_the_package_imports_no_engine():
    script = (
        "import sys, kvcsfs.connectors, kvcsfs.connectors.store, kvcsfs.connectors.llama_cpp\n"
        "print([m for m in ('lmcache', 'numpy', 'sglang', 'torch', 'transformers', 'vllm') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


# -- jobs


def test_a_job_ends_with_its_last_value():
    ends = []
    jobs: Jobs[str] = Jobs(lambda: ends.append(1))
    job = jobs.start("a", 2)
    jobs.settle(job, 1, ok=True)
    assert (jobs.take(), ends, len(jobs), jobs.wait(0)) == ([], [], 1, False)
    jobs.settle(job, 0, ok=False)
    assert ([(j.tag, j.ok) for j in jobs.take()], ends, jobs.wait(0)) == ([("a", [False, True])], [1], True)
    assert jobs.take() == []
    jobs.settle_all(jobs.start("b", 3), [True, False, True])
    (ended,) = jobs.take()
    assert (ended.tag, ended.ok, ends, jobs.wait(0)) == ("b", [True, False, True], [1, 1], True)
    assert ended.seconds > 0


def test_a_job_of_nothing_ends_once():
    ends = []
    jobs: Jobs[str] = Jobs(lambda: ends.append(1))
    jobs.settle_all(jobs.start("a", 0), [])
    assert ([j.ok for j in jobs.take()], ends) == ([[]], [1])


# -- the store


def value(i: int, size: int = 10_000) -> bytes:
    return bytes([i % 251]) * size


def test_the_store_gives_back_what_it_took(tmp_path):
    with Daemon(tmp_path, 64 << 20) as daemon:
        store = Store(Settings(socket=daemon.socket))
        keys = [f"m/{i}" for i in range(4)]
        assert store.save(keys[:3], [value(i) for i in range(3)]) == [True] * 3
        assert store.match(keys) == 3
        assert store.match([keys[3], *keys]) == 0
        assert store.sizes(keys) == [10_000] * 3 + [0]
        buffers = [[bytearray(4_000), bytearray(6_000)] for _ in keys]
        assert store.load(keys, buffers) == [True, True, True, False]
        assert [b"".join(parts) for parts in buffers[:3]] == [value(i) for i in range(3)]
        assert store.fetch(keys[1]) == value(1)
        store.touch(keys)
        assert store.remove([keys[0], keys[3]]) == [True, False]
        assert store.remove_below("m/")
        assert store.match(keys[1:]) == 0
        assert store.stats()["hits"] == 4
        store.close()


def test_a_value_of_another_size_is_a_miss(tmp_path):
    with Daemon(tmp_path, 64 << 20) as daemon:
        store = Store(Settings(socket=daemon.socket))
        store.save(["m/a"], [value(1)])
        assert store.load(["m/a"], [bytearray(10_001)]) == [False]
        assert store.load(["m/a"], [bytearray(9_999)]) == [False]
        assert store.stats()["wrong_size"] == 1
        store.close()


def test_a_stored_value_is_kept(tmp_path):
    with Daemon(tmp_path, 64 << 20) as daemon:
        store = Store(Settings(socket=daemon.socket))
        ended = threading.Event()
        assert store.save(["m/a"], [value(1)]) == [True]
        assert store.save(["m/a"], [value(2)]) == [True]
        assert store.save_later("m/a", value(3), lambda _: ended.set())
        assert ended.wait(30)
        assert store.fetch("m/a") == value(1)
        store.close()


def test_a_closed_store_takes_nothing_more_and_starts_no_thread(tmp_path):
    store = Store(Settings(socket=str(tmp_path / "none")))
    store.close()
    before = threading.active_count()
    assert not store.save_later("k", b"value", lambda stored: None)
    assert threading.active_count() == before
    assert store.stats()["dropped"] == 1


def test_a_queue_that_is_full_drops_and_counts(tmp_path):
    with Daemon(tmp_path, 64 << 20) as daemon:
        store = Store(Settings(socket=daemon.socket, queue_bytes=15_000))
        told: list[bool] = []
        first = store.save_later("m/large", value(1, 16_000), told.append)
        second = store.save_later("m/fits", value(1), told.append)
        assert (first, second, store.flush(30), told) == (False, True, True, [True])
        assert store.stats()["dropped"] == 1
        store.close()


@pytest.mark.filterwarnings("error")
def test_without_a_daemon_everything_is_a_miss(tmp_path, caplog):
    store = Store(Settings(socket=str(tmp_path / "none")))
    told: list[bool] = []
    assert (store.exists(["a"]), store.match(["a"]), store.sizes(["a"])) == ([False], 0, [0])
    assert (store.load(["a"], [bytearray(1)]), store.save(["a"], [b"x"])) == ([False], [False])
    assert (store.fetch("a"), store.remove(["a"]), store.remove_below("a")) == (None, [False], False)
    assert store.save_later("a", b"x", told.append)
    store.touch(["a"])
    assert store.flush(30)
    assert told == [False]
    store.close()
    store.close()
    assert store.load(["a"], [bytearray(1)]) == [False]  # closed by now
    assert len(caplog.records) == 1  # it says so once a minute
    counts = store.stats()
    assert (counts["query_failed"], counts["load_failed"], counts["save_failed"]) == (3, 3, 2)


def test_what_a_caller_gets_wrong_does_not_end_its_thread(tmp_path):
    store = Store(Settings(socket=str(tmp_path / "none")))
    same = bytearray(8)
    assert store.load(["a", "b"], [same, same]) == [False, False]
    assert store.load(["a"], [b"read-only"]) == [False]
    assert store.save_later("a", memoryview(bytes(8))[::2], lambda _: None) is False
    store.close()


def test_a_killed_daemon_is_misses_and_its_values_are_there_again(tmp_path):
    with Daemon(tmp_path, 64 << 20) as daemon:
        store = Store(Settings(socket=daemon.socket))
        keys = [f"m/{i}" for i in range(8)]
        assert all(store.save(keys, [value(i) for i in range(8)]))
        daemon.kill()
        buffers = [bytearray(10_000) for _ in keys]
        assert (store.match(keys), store.load(keys, buffers), store.save(["m/x"], [b"x"])) == (
            0,
            [False] * 8,
            [False],
        )
        daemon.start()
        assert store.match(keys) == 8
        assert store.load(keys, buffers) == [True] * 8
        assert buffers == [value(i) for i in range(8)]
        store.close()


def test_a_store_that_lets_deadlines_pass_is_left_alone_for_a_while(tmp_path):
    from tests.sdk.fake_daemon import FakeDaemon

    daemon = FakeDaemon(tmp_path)
    store = Store(Settings(socket=daemon.path, deadline_s=0.05, pause_s=3600.0))
    assert store.save(["a"], [b"x"]) == [True]
    daemon.stop()
    listener = silent(daemon.path)
    assert store.match(["a"]) == 0
    before = threading.active_count()
    assert [store.match(["a"]) for _ in range(100)] == [0] * 100  # at once, or this would take 5 s
    assert threading.active_count() == before
    assert store.stats()["query_failed"] == 101
    store.close()
    listener.close()


def silent(path: str | os.PathLike[str]):
    """A socket that takes connections and says nothing."""
    import socket

    Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


# -- memory


def test_a_tensor_on_a_device_is_refused_before_its_address_is_read():
    tensor = Tensor((2,), FLOAT16)
    assert len(view_of(tensor)) == 4
    tensor.device.type = "cuda"
    with pytest.raises(ValueError, match="in the memory of a device, cuda"):
        view_of(tensor)
