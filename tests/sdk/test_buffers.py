"""Buffers, their checks and their pool."""

from __future__ import annotations

import array
import ctypes
import math
import mmap
import threading
from typing import Any, ClassVar

import pytest

from kvcsfs.sdk import BufferPool, KvcsLowLevelClient, LLGetItemOpt, LLPutItem
from kvcsfs.sdk.buffers import check_source, check_targets, cut, uninitialised


def test_buffers_of_any_item_size_are_bytes(daemon):
    numbers: Any = array.array("d", range(10))
    with KvcsLowLevelClient(daemon.path) as client:
        assert client.ll_batch_put([LLPutItem("a", numbers)])[0].status == 0
        out: Any = array.array("d", bytes(80))
        grid = memoryview(bytearray(80)).cast("B").cast("d", (2, 5))
        pages = mmap.mmap(-1, 4096)
        results = client.ll_batch_get_into_items([LLGetItemOpt("a")] * 3, [out, grid, pages])
        assert [r.status for r in results] == [80] * 3
        assert out == numbers
        assert grid.tobytes() == pages[:80] == numbers.tobytes()


def test_pieces_of_any_kind_are_bytes():
    made = (ctypes.c_ubyte * 6)()
    ((first, second),) = check_targets([(memoryview(made), memoryview(bytearray(2)))])
    first[:2], second[:] = b"ab", b"cd"  # views of other formats take no bytes
    assert bytes(made) == b"ab\0\0\0\0"
    assert check_source([memoryview(made), b"x"], "value") == [b"ab\0\0\0\0", b"x"]


BASE, PAGES = bytearray(100), mmap.mmap(-1, 4096)


class Named(ctypes.Structure):
    _fields_: ClassVar = [("Of", ctypes.c_int), ("any", ctypes.py_object)]


class Plain(ctypes.Structure):
    _fields_: ClassVar = [("Of", ctypes.c_int)]


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ([b"read only"], r"buffers\[0\] must be writable"),
        ([bytearray(1), memoryview(BASE)[::2]], r"buffers\[1\] must be contiguous"),
        ([BASE, BASE], "given twice"),
        ([BASE, memoryview(BASE)[50:60]], "share memory"),
        ([memoryview(BASE)[:51], memoryview(BASE)[50:]], "share memory"),
        ([[memoryview(BASE)[:51], memoryview(BASE)[50:]]], "share memory"),
        ([memoryview(PAGES)[:51], memoryview(PAGES)[50:]], "share memory"),
        ([memoryview(BASE), memoryview(PAGES), memoryview(BASE)], "share memory"),
        ([[bytearray(1), b"x"]], r"buffers\[0\]\[1\] must be writable"),
        (
            [(ctypes.py_object * 2)()],
            r"buffers\[0\] has elements of format '<?O', which are no bytes but objects",
        ),
        ([bytearray(1), Named()], r"buffers\[1\] has elements of format"),
    ],
)
def test_buffers_that_can_not_be_read_into(buffers, message):
    with pytest.raises(ValueError, match=message):
        check_targets(buffers)


def test_neighbours_in_one_memory_are_fine():
    base = memoryview(bytearray(100))
    assert len(check_targets([base[:50], base[50:], [base[:0], bytearray(3)]])) == 3


def test_a_structs_names_are_no_types():
    structure: Any = Plain()
    (target,) = check_targets([structure])
    assert len(target) == 4


def test_numbers_of_buffers_and_items_must_agree(tmp_path):
    with KvcsLowLevelClient(tmp_path / "none") as client, pytest.raises(ValueError, match="2 items need"):
        client.ll_batch_get_into_items([LLGetItemOpt("a"), LLGetItemOpt("b")], [bytearray(1)])


def test_a_value_that_is_not_contiguous(tmp_path):
    with KvcsLowLevelClient(tmp_path / "none") as client, pytest.raises(ValueError, match="contiguous"):
        client.ll_batch_put([LLPutItem("a", memoryview(b"abcdef")[::2])])
    assert check_source(memoryview(b"").cast("B"), "value") == b""


def test_cutting_views():
    views = [memoryview(b"abc"), memoryview(b""), memoryview(b"defg")]
    assert b"".join(cut(views, 2, 3, 99)) == b"cde"
    assert b"".join(cut(views, 0, 7, 1)) == b"abc"
    assert cut(views, 7, 1, 99) == []


def test_memory_that_is_not_filled():
    made = uninitialised(1 << 20)
    assert type(made) is bytearray
    assert len(made) == 1 << 20
    made[:] = b"x" * len(made)
    made.append(1)


def test_a_pool_lends_pages_and_takes_them_back():
    pool = BufferPool(3, 5000)
    with pool.take(2) as lent:
        assert [len(view) for view in lent] == [5000, 5000]
        check_targets(lent)
        with pytest.raises(TimeoutError, match="2 buffers"), pool.take(2, timeout_s=0.001):
            pass
        lent[0][:1] = b"x"
    with pool.take(3) as lent:
        assert sorted(bytes(view[:1]) for view in lent) == [b"\0", b"\0", b"x"]  # the same memory again
    with pytest.raises(ValueError, match="3 buffers"), pool.take(4):
        pass
    with pytest.raises(ValueError, match="at least 1"):
        BufferPool(0, 1)


def test_a_pool_grows():
    pool = BufferPool(2, 4096)
    with pool.take(1) as held:
        pool.grow(10_000)
        with pool.take(1) as lent:
            assert len(lent[0]) == 10_000
        assert len(held[0]) == 4096
    with pool.take(2) as lent:
        assert [len(view) for view in lent] == [10_000] * 2


def test_a_pool_that_can_not_grow_keeps_its_buffers():
    pool = BufferPool(2, 4096)
    pool.grow(1 << 50)
    for _ in range(3):
        with pytest.raises(OSError, match="Cannot allocate memory"), pool.take(1, timeout_s=1):
            pass


def test_a_waiting_take_gets_what_is_returned():
    pool, got = BufferPool(1, 1), threading.Event()

    def take() -> None:
        with pool.take(1, timeout_s=math.inf):
            got.set()

    with pool.take(1):
        thread = threading.Thread(target=take)
        thread.start()
        assert not got.is_set()
    assert got.wait(5)
    thread.join()
