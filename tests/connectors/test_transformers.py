"""The transformers connector with small stand-ins for tensors and caches, on a real daemon."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.connectors.fakes.torch import BFLOAT16, FLOAT16, FLOAT32, Tensor
from tests.connectors.fakes.transformers import TRANSFORMERS, DynamicCache
from tests.engines.daemon import Daemon

CONNECTOR = ("transformers", TRANSFORMERS)
TOKENS = list(range(500, 571))  # 4 blocks of 16, and 7 tokens more
SHAPES = [(2, 8, 8), (1, 4, 12), (3, 8, 4)]  # layers that differ


def model(dtype: Any = BFLOAT16, **changes: Any) -> Any:
    config = {
        "name_or_path": "org/model",
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "hidden_size": 64,
    }
    return SimpleNamespace(config=SimpleNamespace(**config | changes), dtype=dtype)


def computed(tokens: list[int], dtype: Any = BFLOAT16, shapes: Any = SHAPES) -> DynamicCache:
    """A cache whose bytes at a token depend on all tokens up to it, as a model's do."""
    cache = DynamicCache()
    for i, (heads, *dimensions) in enumerate(shapes):
        tensors = []
        for kind, dimension in enumerate(dimensions):
            row = dimension * dtype.itemsize
            rows = [
                random.Random(f"{tokens[: t + 1]} {i} {h} {kind}").randbytes(row)
                for h in range(heads)
                for t in range(len(tokens))
            ]
            tensors.append(Tensor((1, heads, len(tokens), dimension), dtype, b"".join(rows)))
        cache.update(tensors[0], tensors[1], i)
    return cache


def contents(cache: DynamicCache) -> list[tuple[Any, bytes, Any, bytes]]:
    return [
        (x.keys.shape, bytes(x.keys.memory), x.values.shape, bytes(x.values.memory)) for x in cache.layers
    ]


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
def test_a_prefix_is_restored_to_the_byte_in_a_new_process_of_the_model(module, daemon, dtype):
    writer = module.KvcsPrefixCache(model(dtype), block_tokens=16, socket=daemon.socket)
    assert writer.save(TOKENS, computed(TOKENS, dtype)) == 4
    assert writer.flush(30)
    for reader in (writer, module.KvcsPrefixCache(model(dtype), block_tokens=16, socket=daemon.socket)):
        assert contents(reader.restore(TOKENS)) == contents(computed(TOKENS[:64], dtype))
        other = TOKENS[:40] + [9] * 40
        assert contents(reader.restore(other)) == contents(computed(TOKENS[:32], dtype))
        assert reader.restore([9, *TOKENS]).get_seq_length() == 0
        reader.close()


def test_blocks_are_read_to_where_they_stay(module, daemon):
    prefixes = module.KvcsPrefixCache(model(), block_tokens=16, socket=daemon.socket)
    prefixes.save(TOKENS, computed(TOKENS))
    assert prefixes.flush(30)
    restored = prefixes.restore(TOKENS)
    assert (restored.get_seq_length(), restored.copied_tokens) == (64, 0)
    prefixes.close()


def test_a_block_evicted_between_query_and_read_ends_the_prefix(module, daemon):
    prefixes = module.KvcsPrefixCache(model(), block_tokens=16, socket=daemon.socket)
    prefixes.save(TOKENS, computed(TOKENS))
    assert prefixes.flush(30)
    match = prefixes._store.match

    def evicted_afterwards(keys: list[str]) -> int:
        found: int = match(keys)
        prefixes._store.remove(keys[2:3])
        return found

    prefixes._store.match = evicted_afterwards
    assert contents(prefixes.restore(TOKENS)) == contents(computed(TOKENS[:32]))
    prefixes.close()


def test_one_token_is_left_to_compute(module, daemon):
    prefixes = module.KvcsPrefixCache(model(), block_tokens=16, socket=daemon.socket)
    prefixes.save(TOKENS[:32], computed(TOKENS[:32]))
    assert prefixes.flush(30)
    assert [prefixes.restore(TOKENS[:n]).get_seq_length() for n in (0, 1, 16, 17, 32, 33)] == [
        0,
        0,
        0,
        16,
        16,
        32,
    ]
    prefixes.close()


def test_only_new_blocks_are_written(module, daemon):
    prefixes = module.KvcsPrefixCache(model(), block_tokens=16, socket=daemon.socket)
    assert prefixes.save(TOKENS[:33], computed(TOKENS[:33])) == 2
    assert prefixes.flush(30)
    assert prefixes.save(TOKENS, computed(TOKENS)) == 2
    assert prefixes.save(TOKENS, computed(TOKENS[:20])) == 0  # the cache holds fewer tokens than the prompt
    prefixes.close()


def test_what_differs_shares_nothing(module, daemon):
    prefixes = module.KvcsPrefixCache(model(), block_tokens=16, socket=daemon.socket)
    prefixes.save(TOKENS, computed(TOKENS))
    assert prefixes.flush(30)
    others = [
        (model(FLOAT16), {}),
        (model(name_or_path="org-model"), {}),
        (model(hidden_size=65), {}),
        (model(), {"version": "v2"}),
        (model(), {"seed": "tenant"}),
        (model(), {"name": "finetuned"}),
    ]
    for other, options in others:
        reader = module.KvcsPrefixCache(other, block_tokens=16, socket=daemon.socket, **options)
        assert reader.restore(TOKENS).get_seq_length() == 0
        reader.close()
    prefixes.close()


def test_layers_of_another_shape_are_a_miss(module, daemon):
    writer = module.KvcsPrefixCache(model(), block_tokens=16, socket=daemon.socket)
    writer.save(TOKENS, computed(TOKENS))
    assert writer.flush(30)
    reader = module.KvcsPrefixCache(model(), block_tokens=16, socket=daemon.socket)
    swapped = [(heads, of_value, of_key) for heads, of_key, of_value in SHAPES]  # the same number of bytes
    reader.save([1] * 16, computed([1] * 16, shapes=swapped))
    assert reader.restore(TOKENS).get_seq_length() == 0
    writer.close()
    reader.close()


def test_caches_that_cannot_be_cut_into_blocks_are_not_saved(module, daemon):
    prefixes = module.KvcsPrefixCache(model(), block_tokens=16, socket=daemon.socket)
    sliding, two, on_gpu, other = (computed(TOKENS) for _ in range(4))
    sliding.layers[1].is_sliding = True
    two.layers[0].keys.shape = (2, 1, len(TOKENS), 8)
    on_gpu.layers[2].keys.device = SimpleNamespace(type="cuda")
    other.layers[0].keys.dtype = FLOAT16
    assert [prefixes.save(TOKENS, cache) for cache in (sliding, two, on_gpu, other, DynamicCache())] == [
        0
    ] * 5
    assert prefixes.stats()["unsupported"] == 4
    prefixes.close()


def test_a_tensor_that_is_strided_is_copied_first(module, daemon):
    prefixes = module.KvcsPrefixCache(model(), block_tokens=16, socket=daemon.socket)
    cache = computed(TOKENS)
    cache.layers[0].keys.strided = True
    assert prefixes.save(TOKENS, cache) == 4
    assert prefixes.flush(30)
    assert contents(prefixes.restore(TOKENS)) == contents(computed(TOKENS[:64]))
    prefixes.close()


def test_a_store_too_small_restores_what_is_left_and_nothing_wrong(module, tmp_path):
    with Daemon(tmp_path, 1 << 20) as daemon:  # about 30 prompts
        prefixes = module.KvcsPrefixCache(model(), block_tokens=16, socket=daemon.socket)
        lengths = []
        for prompt in range(45):
            tokens = [prompt, *TOKENS]
            prefixes.save(tokens, computed(tokens))
            assert prefixes.flush(30)
            for asked in {prompt, max(prompt - 34, 0)}:
                tokens = [asked, *TOKENS]
                cache = prefixes.restore(tokens)
                lengths.append(cache.get_seq_length())
                assert contents(cache) == contents(computed(tokens[: lengths[-1]])) or not lengths[-1]
        assert 64 in lengths
        assert 0 in lengths
        prefixes.close()


def test_a_daemon_killed_in_the_middle_is_misses_until_it_is_back(module, daemon):
    prefixes = module.KvcsPrefixCache(model(), block_tokens=16, socket=daemon.socket)
    prefixes.save(TOKENS, computed(TOKENS))
    assert prefixes.flush(30)
    daemon.kill()
    assert prefixes.restore(TOKENS).get_seq_length() == 0
    prefixes.save([1, *TOKENS], computed([1, *TOKENS]))
    assert prefixes.flush(30)
    daemon.start()
    assert contents(prefixes.restore(TOKENS)) == contents(computed(TOKENS[:64]))
    assert prefixes.restore([1, *TOKENS]).get_seq_length() == 0
    assert prefixes.save([1, *TOKENS], computed([1, *TOKENS])) == 4
    prefixes.close()


def test_what_is_wrong_with_the_arguments_is_said_at_once(module):
    with pytest.raises(ValueError, match="the model has no name"):
        module.KvcsPrefixCache(model(name_or_path=""))
    with pytest.raises(ValueError, match="block_tokens must be at least 1, not 0"):
        module.KvcsPrefixCache(model(), block_tokens=0)
    with pytest.raises(ValueError, match="unknown option 'sokcet'"):
        module.KvcsPrefixCache(model(), sokcet="/s")


def test_tokens_that_are_none_do_not_end_a_generation(module, tmp_path):
    prefixes = module.KvcsPrefixCache(model(), block_tokens=16, socket=str(tmp_path / "none"))
    assert prefixes.restore([-1] * 40).get_seq_length() == 0
    assert prefixes.save([-1] * 40, computed(TOKENS)) == 0
    assert prefixes.stats()["errors"] == 2
    prefixes.close()
