# ruff: noqa: E402  # the engine is imported once it is known to be there
"""The transformers connector with real models: small ones with random weights, on the CPU."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.engines.daemon import Daemon

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvcsfs.connectors.transformers import KvcsPrefixCache

pytestmark = pytest.mark.engines

TOKENS = torch.randint(0, 256, (203,), generator=torch.Generator().manual_seed(1)).tolist()
NEW = 12


def llama(dtype: Any = torch.float32, **changes: Any) -> Any:
    sizes = {"hidden_size": 128, "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=256, intermediate_size=256, max_position_embeddings=512, **sizes | changes
    )
    return seeded(transformers.LlamaForCausalLM, config, dtype)


def gpt2(dtype: Any = torch.float32) -> Any:
    config = transformers.GPT2Config(vocab_size=256, n_embd=96, n_layer=3, n_head=6, n_positions=512)
    return seeded(transformers.GPT2LMHeadModel, config, dtype)


def seeded(kind: Any, config: Any, dtype: Any) -> Any:
    torch.manual_seed(0)
    return kind(config).to(dtype).eval()


def generate(model: Any, tokens: list[int], cache: Any = None) -> tuple[list[int], Any]:
    ids = torch.tensor([tokens])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=NEW,
        do_sample=False,
        use_cache=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        eos_token_id=None,
    )
    return output.sequences[0].tolist(), output.past_key_values


def assert_same_bits(cache: Any, other: Any, length: int) -> None:
    assert cache.get_seq_length() == length
    for layer, reference in zip(cache.layers, other.layers, strict=True):
        assert torch.equal(layer.keys, reference.keys[:, :, :length])
        assert torch.equal(layer.values, reference.values[:, :, :length])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "make", [llama, gpt2, lambda dtype: llama(dtype, head_dim=32, num_hidden_layers=1, num_key_value_heads=8)]
)
def test_generation_after_a_restore_gives_the_same_tokens(daemon, make, dtype):
    model = make(dtype)
    plain, computed = generate(model, TOKENS)
    prefixes = KvcsPrefixCache(model, name="random", block_tokens=16, socket=daemon.socket)
    assert prefixes.restore(TOKENS).get_seq_length() == 0
    assert prefixes.save(plain, computed) == (len(TOKENS) + NEW - 1) // 16
    assert prefixes.flush(30)
    restored = prefixes.restore(TOKENS)
    assert_same_bits(restored, computed, 192)
    again, after = generate(model, TOKENS, restored)
    # What follows is computed in another order of sums; in half precision even equal sums could round apart.
    kept = transformers.DynamicCache()
    for i, layer in enumerate(computed.layers):
        kept.update(layer.keys[:, :, :192], layer.values[:, :, :192], i)
    assert again == generate(model, TOKENS, kept)[0]
    if dtype == torch.float32:
        assert again == plain
    assert after.get_seq_length() == len(TOKENS) + NEW - 1
    prefixes.close()


def test_a_prompt_that_shares_a_part_restores_that_part(daemon):
    model = llama()
    prefixes = KvcsPrefixCache(model, name="random", block_tokens=16, socket=daemon.socket)
    prefixes.save(*generate(model, TOKENS))
    assert prefixes.flush(30)
    other = TOKENS[:100] + [7] * 50
    cache = prefixes.restore(other)
    assert cache.get_seq_length() == 96
    assert generate(model, other, cache)[0] == generate(model, other)[0]
    prefixes.close()


def test_another_process_restores_it(daemon):
    model = llama()
    prefixes = KvcsPrefixCache(model, name="random", block_tokens=16, socket=daemon.socket)
    plain, computed = generate(model, TOKENS)
    prefixes.save(plain, computed)
    assert prefixes.flush(30)
    script = (
        "from tests.engines.test_transformers_engine import *\n"
        f"prefixes = KvcsPrefixCache(llama(), name='random', block_tokens=16, socket={daemon.socket!r})\n"
        "cache = prefixes.restore(TOKENS)\n"
        "print(cache.get_seq_length(), generate(llama(), TOKENS, cache)[0])\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.stdout == f"192 {plain}\n", ended.stderr
    prefixes.close()


def test_a_cache_of_a_sliding_window_is_left_alone(daemon):
    config = transformers.MistralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=32,
    )  # fmt: skip
    model = seeded(transformers.MistralForCausalLM, config, torch.float32)
    prefixes = KvcsPrefixCache(model, name="random", block_tokens=16, socket=daemon.socket)
    plain, computed = generate(model, TOKENS)
    assert prefixes.save(plain, computed) == 0
    assert prefixes.stats()["unsupported"] == 1
    prefixes.close()


def test_eviction_all_the_time_and_a_killed_daemon_change_no_token(tmp_path):
    model = llama()
    prompts = [[i, *TOKENS[:60]] for i in range(12)]
    plain = [generate(model, prompt)[0] for prompt in prompts]
    lengths = []
    with Daemon(tmp_path, 1 << 20) as daemon:  # room for about 37 of 48 blocks
        prefixes = KvcsPrefixCache(model, name="random", block_tokens=16, socket=daemon.socket)
        for turn in range(36):
            if turn == 12:
                daemon.kill()
            if turn == 18:
                daemon.start()
            chosen = (turn * 5) % 12 if turn % 3 else turn // 3
            cache = prefixes.restore(prompts[chosen])
            lengths.append(cache.get_seq_length())
            tokens, cache = generate(model, prompts[chosen], cache)
            assert tokens == plain[chosen]
            prefixes.save(tokens, cache)
            assert prefixes.flush(30)
        assert set(lengths[12:18]) == {0}
        assert max(lengths) >= 48
        prefixes.close()
