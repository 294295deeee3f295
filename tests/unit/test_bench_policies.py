"""The ideal caches, on traces small enough to follow by hand."""

import pytest

from kvcsfs.bench.policies import belady, charged_bytes, ideal_lru


@pytest.mark.parametrize(
    ("size", "charged"), [(1, 8192), (4096, 8192), (4097, 12288), (4 << 20, (4 << 20) + 4096)]
)
def test_charged_bytes(size, charged):
    assert charged_bytes(size) == charged


def test_a_sweep_one_larger_than_an_lru_never_hits():
    requests = [[1], [2], [3]] * 3
    assert ideal_lru(requests, 2) == 0
    assert ideal_lru(requests, 3) == 6


def test_a_read_refreshes():
    # 1 2 | read 1 | 3 pushes 2 out | 1 is there, 2 is not
    assert ideal_lru([[1], [2], [1], [3], [1], [2]], 2) == 2


def test_within_a_batch_the_tail_goes_first():
    # [1 2 3] leaves 1 newest and 3 oldest; 9 pushes 3 out, so 1 2 are a run of two.
    assert ideal_lru([[1, 2, 3], [9], [1, 2, 3]], 3) == 2


def test_a_read_of_a_run_leaves_its_head_newest():
    # 1 2 are written, then read (1 newest); 9 pushes 2 out, so 1 hits: 2 + 1.
    assert ideal_lru([[1, 2], [1, 2], [9], [1, 2]], 2) == 3


def test_only_the_leading_run_counts():
    # 2 is cached, 5 before it is not: no hit, and 2 is written again. Then 5 2 is a run.
    assert ideal_lru([[2], [5, 2], [5, 2]], 9) == 2
    assert belady([[2], [5, 2], [5, 2]], 9) == 2


def test_a_batch_larger_than_the_cache_keeps_its_head():
    assert ideal_lru([[1, 2, 3, 4], [1, 2, 3, 4]], 2) == 2
    assert belady([[1, 2, 3, 4], [1, 2, 3, 4]], 2) == 2


def test_belady_on_the_textbook_string():
    # With three frames 0, 2 and 3 can stay from their first use on; 7, 1 and 4 are never needed again.
    # So 6 misses of 13. (Where every page must be taken in, the optimum has 7.)
    string = [[block] for block in (7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2)]
    assert belady(string, 3) == 7
    assert ideal_lru(string, 3) == 4


def test_belady_refuses_what_is_never_needed_again():
    # Room for one: 1 stays while 2 and 3 pass.
    assert belady([[1], [2], [1], [3], [1]], 1) == 2
    assert ideal_lru([[1], [2], [1], [3], [1]], 1) == 0


def test_belady_gives_up_the_tail_of_a_chain_first():
    # 1 2 3 are needed at the same later time; with room for two the head 1 2 has to stay to be of use.
    assert belady([[1, 2, 3], [8], [1, 2, 3]], 2) == 2


def test_no_room_no_hits():
    assert ideal_lru([[1], [1]], 0) == 0
    assert belady([[1], [1]], 0) == 0


@pytest.mark.parametrize("room", [1, 2, 3, 4, 6])
def test_belady_is_never_behind_and_equals_the_best_of_all_choices(room):
    requests = [[1, 2, 3], [4], [1, 2, 5], [4, 6], [1, 2, 3], [4, 6], [1, 7]]
    assert belady(requests, room) == exhaustive(requests, room) >= ideal_lru(requests, room)


def exhaustive(requests, room):
    """The most hits that any choice of what to keep after each request can give."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for blocks in requests:
        following: dict[frozenset[int], int] = {}
        for cached, hits in best.items():
            run = 0
            while run < len(blocks) and blocks[run] in cached:
                run += 1
            for kept in subsets(cached | set(blocks), room):
                following[kept] = max(following.get(kept, 0), hits + run)
        best = following
    return max(best.values())


def subsets(blocks, room):
    found: list[frozenset[int]] = [frozenset()]
    for block in blocks:
        found += [kept | {block} for kept in found if len(kept) < room]
    return found
