"""LMCache's L2 adapter with small stand-ins for its objects, on a real daemon."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from typing import Any

import pytest

from tests.connectors.fakes.lmcache import LMCACHE_L2, MemoryObj, ObjectKey
from tests.connectors.fakes.torch import BFLOAT16, FLOAT16
from tests.engines.daemon import Daemon

CONNECTOR = ("lmcache_l2", LMCACHE_L2)
SHAPE = [16, 64, 8]
SIZE = 16 * 64 * 8 * 2
KEYS = [ObjectKey(bytes([i]) * 32) for i in range(6)]


def objects(count: int, dtype: Any = BFLOAT16) -> list[MemoryObj]:
    made = [MemoryObj([SHAPE], [dtype]) for _ in range(count)]
    return [memory.fill(os.urandom(SIZE)) for memory in made]


def wait(fd: int, ask: Callable[[], Any]) -> Any:
    """Ask each time the descriptor says that something ended, as LMCache's controllers do."""
    while True:
        ready, _, _ = select.select([fd], [], [], 30)
        assert ready, "no event within 30 s"
        os.eventfd_read(fd)
        if answer := ask():
            return answer


def store(adapter: Any, keys: list[ObjectKey], memories: list[MemoryObj]) -> int:
    task = adapter.submit_store_task(keys, memories)
    results = wait(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
    assert list(results) == [task]
    return int(results[task])


def lookup(adapter: Any, keys: list[ObjectKey]) -> list[bool]:
    task = adapter.submit_lookup_and_lock_task(keys, {})
    bits = wait(
        adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task)
    ).bits
    assert adapter.query_lookup_and_lock_result(task) is None  # once
    adapter.submit_unlock(keys)
    return list(bits)


def load(adapter: Any, keys: list[ObjectKey], memories: list[MemoryObj]) -> list[bool]:
    task = adapter.submit_load_task(keys, memories)
    return list(wait(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task)).bits)


def test_objects_come_back_to_the_byte(module, daemon):
    adapter = module.KvcsL2Adapter({"socket": daemon.socket}, l1_memory_desc=None)
    descriptors = {
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }
    assert len(descriptors) == 3
    memories, out = objects(3), objects(4)
    before = out[3].content()
    assert store(adapter, KEYS[:3], memories) == 3 * SIZE
    assert lookup(adapter, KEYS[:4]) == [True] * 3 + [False]
    assert load(adapter, KEYS[:4], out) == [True] * 3 + [False]
    assert [memory.content() for memory in out] == [memory.content() for memory in memories] + [before]
    assert adapter.told == [("stored", KEYS[:3], [SIZE] * 3)]
    status = adapter.report_status()
    assert (status["is_healthy"], status["saved"], status["hits"], status["misses"]) == (True, 3, 3, 1)
    adapter.close()


def test_models_ranks_groups_salts_and_dtypes_share_nothing(module, daemon):
    adapter = module.KvcsL2Adapter({"socket": daemon.socket})
    store(adapter, KEYS[:1], objects(1))
    changes = [{"model_name": "org-model"}, {"kv_rank": 1}, {"object_group_id": 1}, {"cache_salt": "tenant"}]
    assert lookup(adapter, [ObjectKey(**vars(KEYS[0]) | change) for change in changes]) == [False] * 4
    assert load(adapter, KEYS[:1], objects(1, FLOAT16)) == [False]  # the same number of bytes
    adapter.close()


def test_delete_tells_what_is_gone(module, daemon):
    adapter = module.KvcsL2Adapter({"socket": daemon.socket})
    store(adapter, KEYS[:2], objects(2))
    adapter.delete(KEYS[1:3])
    assert adapter.told[1:] == [("deleted", KEYS[1:2], [SIZE])]
    assert lookup(adapter, KEYS[:3]) == [True, False, False]
    adapter.close()


def test_tasks_of_nothing_end(module, daemon):
    adapter = module.KvcsL2Adapter({"socket": daemon.socket})
    assert (store(adapter, [], []), lookup(adapter, []), load(adapter, [], [])) == (0, [], [])
    adapter.close()


def test_a_task_with_an_object_that_was_dropped_has_failed(module, daemon):
    adapter = module.KvcsL2Adapter({"socket": daemon.socket, "queue_bytes": 1000})
    assert store(adapter, KEYS[:1], objects(1)) == -1
    assert (adapter.report_status()["dropped"], adapter.told) == (1, [])
    adapter.close()


def test_an_object_whose_memory_is_gone_is_a_failure_of_its_task(module, daemon, monkeypatch):
    adapter = module.KvcsL2Adapter({"socket": daemon.socket})
    (gone,) = objects(1)
    monkeypatch.setattr(gone, "get_dtypes", lambda: 1 / 0)
    assert store(adapter, KEYS[:1], [gone]) == -1
    store(adapter, KEYS[:1], objects(1))
    assert load(adapter, KEYS[:1], [gone]) == [False]
    assert adapter.report_status()["errors"] == 2
    adapter.close()


def test_a_closed_adapter_answers_with_misses(module, daemon):
    adapter = module.KvcsL2Adapter({"socket": daemon.socket})
    assert store(adapter, KEYS[1:2], objects(1)) > 0
    adapter._threads.shutdown()
    assert load(adapter, KEYS[:1], objects(1)) == [False]
    adapter.close()
    for submit, of in (("load", objects(1)), ("store", objects(1)), ("lookup_and_lock", {})):
        getattr(adapter, f"submit_{submit}_task")(KEYS[:1], of)
    assert list(adapter.pop_completed_store_tasks().values()) == [-1]
    adapter.close()


def test_a_store_that_ends_after_close_leaves_the_descriptor_alone(module, daemon):
    adapter = module.KvcsL2Adapter({"socket": daemon.socket})
    job = adapter._stores.jobs.start(1, 1)  # its put hangs in the store
    number = adapter.get_store_event_fd()
    adapter.close()
    others = os.eventfd(0, os.EFD_NONBLOCK)
    assert others == number
    adapter._stores.jobs.settle(job, 0, ok=False)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(others)
    os.close(others)


def test_a_daemon_killed_in_the_middle_is_misses_until_it_is_back(module, daemon):
    adapter = module.KvcsL2Adapter({"socket": daemon.socket})
    memories, out = objects(2), objects(2)
    store(adapter, KEYS[:2], memories)
    daemon.kill()
    assert lookup(adapter, KEYS[:2]) == load(adapter, KEYS[:2], out) == [False, False]
    assert store(adapter, KEYS[2:3], objects(1)) == -1
    adapter.delete(KEYS[:1])
    daemon.start()
    assert lookup(adapter, KEYS[:3]) == [True, True, False]
    assert load(adapter, KEYS[:2], out) == [True, True]
    assert [memory.content() for memory in out] == [memory.content() for memory in memories]
    adapter.close()


def test_eviction_all_the_time_gives_misses_and_no_wrong_byte(module, tmp_path):
    with Daemon(tmp_path, 1 << 20) as daemon:  # 42 objects
        adapter = module.KvcsL2Adapter({"socket": daemon.socket})
        known: dict[ObjectKey, bytes] = {}
        answers = []
        for turn in range(30):
            keys = [ObjectKey(bytes([turn, i]) * 16) for i in range(4)]
            memories = objects(4)
            known |= {key: memory.content() for key, memory in zip(keys, memories, strict=True)}
            assert store(adapter, keys, memories) == 4 * SIZE
            asked = [ObjectKey(bytes([max(0, turn - back), i]) * 16) for back in (0, 15) for i in range(4)]
            out = objects(8)
            bits = load(adapter, asked, out)
            answers += bits
            assert all(not bit or m.content() == known[k] for bit, m, k in zip(bits, out, asked, strict=True))
        assert set(answers) == {True, False}
        adapter.close()


def test_a_wrong_option_is_refused(module):
    with pytest.raises(ValueError, match="deadline_s must be a number"):
        module.KvcsL2Adapter({"deadline_s": "soon"})
