"""The size calculator."""

from __future__ import annotations

import json

import pytest

from kvcsfs.cli import main
from kvcsfs.size import Model

LARGE = Model(layers=80, kv_heads=8, head_dim=128)


def test_the_example_of_a_large_model():
    assert LARGE.token_bytes == 2 * 80 * 8 * 128 * 2 == 320 << 10
    assert LARGE.value_bytes(64) == 20 << 20
    assert LARGE.charged_bytes(64) == (20 << 20) + 4096


@pytest.mark.parametrize(
    ("model", "token_bytes"),
    [
        (Model(30, 3, 64, "f16"), 2 * 30 * 3 * 64 * 2),  # SmolLM2-135M
        (Model(80, 8, 128, "fp8"), 160 << 10),
        (Model(1, 1, 3, "int4"), 3),
        (Model(2, 4, 192, "bf16", value_head_dim=128), 2 * 4 * 320 * 2),
        (Model(61, dtype="bf16", latent=512 + 64, ranks=8), 61 * 576 * 2),  # DeepSeek-V3
    ],
)
def test_bytes_of_a_token(model, token_bytes):
    assert model.token_bytes == token_bytes


def test_split_over_ranks_each_pays_for_its_own_footer():
    split = Model(80, 8, 128, ranks=8)
    assert (split.token_bytes, split.value_bytes(64)) == (LARGE.token_bytes, (20 << 20) // 8)
    assert split.charged_bytes(64) == (20 << 20) + 8 * 4096
    assert Model(61, latent=576, ranks=8).charged_bytes(64) == Model(61, latent=576).charged_bytes(64)


@pytest.mark.parametrize("block", [1, 16, 100])
@pytest.mark.parametrize("tokens", [1, 1000, 12345])
def test_a_capacity_keeps_the_tokens_that_it_was_computed_for(block, tokens):
    capacity = LARGE.capacity(tokens, block)
    assert tokens <= LARGE.tokens(capacity, block) < tokens + block
    assert LARGE.tokens(capacity - LARGE.charged_bytes(block) // 2, block) < tokens + block


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"layers": 0, "latent": 1}, "must be at least 1, not 0 and 1"),
        ({"layers": 1, "kv_heads": 1}, "expected KV heads and head dimension, or the latent dimension"),
        ({"layers": 1, "kv_heads": 1, "head_dim": 1, "latent": 1}, "or the latent"),
        ({"layers": 1, "kv_heads": 3, "head_dim": 1, "ranks": 2}, "3 KV heads can't be split over 2 ranks"),
        ({"layers": 1, "kv_heads": -1, "head_dim": -1}, "heads and dimensions must be 0 or more"),
        ({"layers": 1, "latent": 1, "dtype": "bf15"}, "unknown dtype 'bf15', expected one of float32"),
    ],
)
def test_a_model_that_is_none_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        Model(**arguments)


def run(capsys, *arguments: str) -> tuple[int, str]:
    status = main(["size", *arguments])
    out, err = capsys.readouterr()
    return status, out or err


def test_the_command(capsys):
    model = ("--layers", "80", "--kv-heads", "8", "--head-dim", "128", "--dtype", "bf16")
    status, text = run(capsys, *model, "--tokens", "1000000")
    assert (status, text.splitlines()) == (
        0,
        [
            "a token: 320.0 KiB",
            "a value of 64 tokens: 20.0 MiB on each of 1 ranks, 20.0 MiB in all with padding and footers",
            "1000000 tokens: a capacity of 308.3 GiB",
        ],
    )
    status, text = run(capsys, *model, "--capacity", "1TiB", "--json")
    assert (status, json.loads(text)["token_bytes"], json.loads(text)["capacity_bytes"]) == (
        0,
        320 << 10,
        1 << 40,
    )
    assert json.loads(text)["tokens"] == LARGE.tokens(1 << 40, 64)
    assert run(capsys, "--layers", "80") == (
        2,
        "kvcsfs: size: expected KV heads and head dimension, or the latent dimension of an MLA model\n",
    )
    assert run(capsys, *model, "--block-tokens", "0") == (
        2,
        "kvcsfs: size: a block has at least 1 token, not 0\n",
    )


def test_tokens_to_keep_are_a_number_from_0(capsys):
    refused = "kvcsfs: size: tokens to keep must be 0 or more, not -1\n"
    assert run(capsys, "--layers", "1", "--latent", "1", "--tokens", "-1") == (2, refused)
