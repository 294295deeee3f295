"""How large a KV cache is: bytes a token, a block, and the capacity that a number of cached tokens needs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BITS = {
    "float32": 32, "fp32": 32, "float16": 16, "fp16": 16, "f16": 16, "bfloat16": 16, "bf16": 16,
    "fp8": 8, "fp8_e4m3": 8, "fp8_e5m2": 8, "int8": 8, "q8": 8, "fp4": 4, "int4": 4, "q4": 4,
}  # fmt: skip
BLOCK_BYTES = 4096  # values are padded to it, and each has a footer of one
KEPT_FREE = 0.01  # of the capacity: background eviction stops there (config: high_watermark)


@dataclass(frozen=True)
class Model:
    """What of a model decides its cache's size.

    `latent`: elements of a token and layer of a model with latent attention (MLA), in place of heads and dimensions:
    its kv_lora_rank + qk_rope_head_dim. `ranks`: workers that the heads are split over; each stores values of its own.
    """

    layers: int
    kv_heads: int = 0
    head_dim: int = 0
    dtype: str = "bf16"
    value_head_dim: int = 0  # 0: as head_dim
    latent: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BITS:
            raise ValueError(f"unknown dtype {self.dtype!r}, expected one of {', '.join(DTYPE_BITS)}")
        if min(self.kv_heads, self.head_dim, self.value_head_dim, self.latent) < 0:
            raise ValueError("heads and dimensions must be 0 or more")
        if self.layers < 1 or self.ranks < 1:
            raise ValueError(f"layers and ranks must be at least 1, not {self.layers} and {self.ranks}")
        if bool(self.latent) == bool(self.kv_heads and self.head_dim):
            raise ValueError("expected KV heads and head dimension, or the latent dimension of an MLA model")
        if self.kv_heads % self.ranks:
            raise ValueError(f"{self.kv_heads} KV heads can't be split over {self.ranks} ranks")

    @property
    def token_bytes(self) -> int:
        """Of all layers and ranks: keys and values, or the latent vector, which is stored once for all ranks."""
        elements = self.latent or self.kv_heads * (self.head_dim + (self.value_head_dim or self.head_dim))
        return -(-self.layers * elements * DTYPE_BITS[self.dtype] // 8)

    @property
    def stored_ranks(self) -> int:
        return 1 if self.latent else self.ranks

    def value_bytes(self, block_tokens: int) -> int:
        """Of one stored value: a block of tokens on one rank."""
        if block_tokens < 1:
            raise ValueError(f"a block has at least 1 token, not {block_tokens}")
        return -(-self.token_bytes * block_tokens // self.stored_ranks)

    def charged_bytes(self, block_tokens: int) -> int:
        """What a block takes of the capacity, on all ranks, with padding and footers."""
        padded = -(-self.value_bytes(block_tokens) // BLOCK_BYTES) * BLOCK_BYTES
        return (padded + BLOCK_BYTES) * self.stored_ranks

    def capacity(self, tokens: int, block_tokens: int) -> int:
        """The capacity that keeps so many tokens."""
        if tokens < 0:
            raise ValueError(f"tokens to keep must be 0 or more, not {tokens}")
        blocks = -(-tokens // block_tokens)
        return int(blocks * self.charged_bytes(block_tokens) / (1 - KEPT_FREE)) + 1

    def tokens(self, capacity: int, block_tokens: int) -> int:
        """How many tokens a capacity keeps."""
        return int(capacity * (1 - KEPT_FREE)) // self.charged_bytes(block_tokens) * block_tokens
