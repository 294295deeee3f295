"""Where brief file work is done: on the loop while the file system answers at once, else in threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import trio

from kvcsfs.engine import lane
from kvcsfs.engine.lane import BRIEF_ITEMS, Lane


def a_lane(*, is_local: bool) -> Lane:
    store: Any = SimpleNamespace(directory=SimpleNamespace(path="/somewhere"), is_local=is_local)
    return Lane(store)


def threads_of(_store: Any, seconds: Sequence[float]) -> list[int]:
    """A job that takes so long for each item; tells where it ran."""
    for duration in seconds:
        time.sleep(duration)
    return [threading.get_ident()] * len(seconds)


async def test_a_local_file_system_is_asked_on_the_loop():
    here = await a_lane(is_local=True).brief(threads_of, [0.0] * (BRIEF_ITEMS + 1))
    assert here == [threading.get_ident()] * (BRIEF_ITEMS + 1)


async def test_any_other_file_system_is_asked_in_a_thread():
    there = await a_lane(is_local=False).brief(threads_of, [0.0])
    assert there != [threading.get_ident()]


async def test_a_slow_answer_sends_the_rest_to_a_thread_for_fifty_times_as_long(monkeypatch):
    monkeypatch.setattr(lane, "BRIEF_SECONDS", 0.01)
    asked = a_lane(is_local=True)
    begin = trio.current_time()
    ran = await asked.brief(threads_of, [0.012, *[0.0] * BRIEF_ITEMS])
    assert ran[:BRIEF_ITEMS] == [threading.get_ident()] * BRIEF_ITEMS
    assert ran[BRIEF_ITEMS] != threading.get_ident()
    while await asked.brief(threads_of, [0.0]) != [threading.get_ident()]:
        await trio.sleep(0.01)
    assert trio.current_time() - begin >= 50 * 0.012


async def test_nothing_is_asked_for_nothing():
    assert await a_lane(is_local=True).brief(threads_of, []) == []
