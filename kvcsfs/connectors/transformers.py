"""transformers: saves a `DynamicCache` by blocks of tokens, and restores what a prompt shares with earlier ones.

A block's value is a small header of its shapes, then each layer's keys and values of its tokens, head by head; all of
it straight from and into the tensors' memory. CPU tensors, batches of one. Tested with transformers 5.19.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from kvcsfs.connectors.engines import missing
from kvcsfs.connectors.keys import KeySpace, block_hashes, leading_run
from kvcsfs.connectors.memory import view_of
from kvcsfs.connectors.settings import Settings
from kvcsfs.connectors.store import Store

try:
    import torch
except ImportError as exc:
    raise missing("torch", "2.13.0", exc) from exc
try:
    from transformers import DynamicCache
except ImportError as exc:
    raise missing("transformers", "5.19.0", exc) from exc

MAGIC = b"kvcstf1\0"
Shape = tuple[int, int, int]  # of one layer: KV heads, dimension of keys, dimension of values


class _Keep:
    """Keeps tensors alive until the bytes of their blocks are taken."""

    def __init__(self, tensors: Any) -> None:
        self._tensors = tensors

    def __call__(self, stored: bool) -> None:
        """A block is done: the reference goes with its entry in the queue."""


class KvcsPrefixCache:
    """The prefix cache of one model. Nothing raises but the constructor; a store that fails restores nothing.

    cache = prefixes.restore(tokens)
    output = model.generate(torch.tensor([tokens]), past_key_values=cache, ...)
    prefixes.save(tokens, cache)
    """

    def __init__(
        self, model: Any, *, name: str = "", block_tokens: int = 64, seed: str = "", **options: Any
    ) -> None:
        """Prepare for `model`, whose config and dtype decide the keys.

        Args:
            name: stands for the model's weights; "" for the name or path that it was loaded from.
            block_tokens: tokens of one value.
            seed: prompts of different seeds share nothing.
            options: see `Settings`.
        Raises:
            ValueError: a model without a name, a block of no tokens, or an option that can't be used.
        """
        settings = Settings.take(options)
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
        config = model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._space = KeySpace(
            model=name or getattr(config, "name_or_path", ""),
            version=settings.version,
            engine="transformers",
            dtype=str(model.dtype).removeprefix("torch."),
            layout=f"layers{config.num_hidden_layers}.heads{heads}.hidden{config.hidden_size}.block{block_tokens}",
            rank="all",
        )
        self._dtype, self._block, self._seed = model.dtype, block_tokens, seed
        self._store = Store(settings)
        self._shapes: list[Shape] | None = None  # of the layers, once one block was seen

    def restore(self, tokens: Sequence[int]) -> DynamicCache:
        """A cache with the longest prefix of `tokens` that is stored; at least one token is left to compute."""
        try:
            return self._restore(self._keys(tokens[:-1]))
        except Exception:  # noqa: BLE001  # the engine's thread must not end with it
            self._store.mishap("restore", 1)
            return DynamicCache()

    def save(self, tokens: Sequence[int], cache: DynamicCache) -> int:
        """Queue the full blocks of `tokens` that `cache` holds and the store doesn't; how many that were.

        The cache's tensors must not be written to in place until they are stored, which DynamicCache never does.
        """
        try:
            return self._save(tokens, cache)
        except Exception:  # noqa: BLE001  # the engine's thread must not end with it
            self._store.mishap("save", 1)
            return 0

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was saved is stored; False if that took too long."""
        return self._store.flush(timeout_s)

    def stats(self) -> dict[str, int]:
        """Counts of blocks, and of caches that can't be cut into blocks (`unsupported`)."""
        return self._store.stats()

    def close(self) -> None:
        """Store what is queued, for 5 s at most, and end."""
        self._store.close()

    def _keys(self, tokens: Sequence[int]) -> list[str]:
        return [self._space.key(block) for block in block_hashes(tokens, self._block, self._seed)]

    # -- restore

    def _restore(self, keys: list[str]) -> DynamicCache:
        cache = DynamicCache()
        keys = keys[: self._store.match(keys)]
        shapes = self._shapes or (self._learn(keys[0]) if keys else None)
        if not keys or not shapes:
            return cache
        layers = [self._empty(shape, len(keys)) for shape in shapes]
        expected = self._header(shapes)
        headers = [bytearray(len(expected)) for _ in keys]
        pieces = self._pieces(layers, range(len(keys)))
        buffers = [[header, *rest] for header, rest in zip(headers, pieces, strict=True)]
        loaded = self._store.load(keys, buffers)
        run = leading_run(ok and header == expected for ok, header in zip(loaded, headers, strict=True))
        for i, layer in enumerate(layers if run else ()):
            self._give(cache, i, *layer, run * self._block)
        return cache

    def _give(self, cache: DynamicCache, i: int, k: Any, v: Any, length: int) -> None:
        """Make tensors the cache's layer `i` as they are: `update` copies all that it is given, into fresh memory."""
        cache.update(k[:, :, :0], v[:, :, :0], i)  # makes the layer
        if length < k.shape[2]:  # fewer blocks than the query had named; the rest need not stay in memory
            k, v = k[:, :, :length].contiguous(), v[:, :, :length].contiguous()
        cache.layers[i].keys, cache.layers[i].values = k, v

    def _empty(self, shape: Shape, blocks: int) -> tuple[Any, Any]:
        heads, of_key, of_value = shape
        length = blocks * self._block
        k = torch.empty((1, heads, length, of_key), dtype=self._dtype)
        return k, torch.empty((1, heads, length, of_value), dtype=self._dtype)

    def _learn(self, key: str) -> list[Shape] | None:
        """The layers' shapes, out of a stored block; None if it is none of ours."""
        value = self._store.fetch(key) or b""
        fixed = struct.Struct("<8sII")
        if len(value) < fixed.size:
            return None
        magic, block, layers = fixed.unpack_from(value)
        if magic != MAGIC or block != self._block or len(value) < fixed.size + 12 * layers:
            return None
        shapes = list(struct.iter_unpack("<III", value[fixed.size : fixed.size + 12 * layers]))
        elements = sum(heads * (of_key + of_value) for heads, of_key, of_value in shapes) * block
        if len(value) != len(self._header(shapes)) + elements * self._dtype.itemsize:
            return None
        self._shapes = shapes
        return shapes

    # -- save

    def _save(self, tokens: Sequence[int], cache: DynamicCache) -> int:
        layers = self._layers(cache)
        if not layers:
            return 0
        shapes = [(k.shape[1], k.shape[3], v.shape[3]) for k, v in layers]
        self._shapes, header = shapes, self._header(shapes)
        keys = self._keys(tokens[: min(k.shape[2] for k, _ in layers)])
        done = _Keep(layers)
        new = self._store.match(keys)
        pieces = self._pieces(layers, range(new, len(keys)))
        return sum(
            self._store.save_later(key, [header, *rest], done)
            for key, rest in zip(keys[new:], pieces, strict=True)
        )

    def _layers(self, cache: DynamicCache) -> list[tuple[Any, Any]]:
        """Keys and values of each layer; empty for a cache whose tokens can't be told apart by place."""
        layers = [(layer.keys, layer.values, getattr(layer, "is_sliding", False)) for layer in cache.layers]
        fits = all(
            k is not None
            and not sliding
            and k.shape[0] == 1
            and k.device.type == "cpu"
            and k.dtype == self._dtype
            for k, _, sliding in layers
        )
        if not fits:
            self._store.count("unsupported")
        return [(k.contiguous(), v.contiguous()) for k, v, _ in layers] if fits else []

    # -- both

    def _header(self, shapes: list[Shape]) -> bytes:
        """Padded, so that the tensors' bytes start at a multiple of 64."""
        header = struct.pack("<8sII", MAGIC, self._block, len(shapes)) + b"".join(
            struct.pack("<III", *shape) for shape in shapes
        )
        return header + bytes(-len(header) % 64)

    def _pieces(self, layers: list[tuple[Any, Any]], blocks: range) -> list[list[memoryview]]:
        """Where each block's bytes lie: keys and values of each layer, each head a piece."""
        heads: list[tuple[memoryview, int]] = []  # tensors are slow to ask: once, not for each block
        for tensor in (t for layer in layers for t in layer):
            _, count, length, dimension = tensor.shape
            memory, row = view_of(tensor), dimension * tensor.element_size()
            whole, size = length * row, self._block * row
            heads += [(memory[head * whole : (head + 1) * whole], size) for head in range(count)]
        return [[head[i * size : (i + 1) * size] for head, size in heads] for i in blocks]
