"""Keys of cached blocks: the same for the same tokens and model, in any process and on any machine."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

_ESCAPED = re.compile(r"[^A-Za-z0-9._=,+-]")
_COMPONENT_CHARS = 120  # of a name; the mount's limit is 255 bytes, the whole key's 1024


def component(text: str) -> str:
    """Make a text one component of a key; different texts give different components.

    What isn't plain is written `~xx` by byte of UTF-8, so that the mount shows it as it is. Long ones end in a hash.
    """
    plain = _ESCAPED.sub(lambda m: "".join(f"~{byte:02x}" for byte in m[0].encode()), text) or "~"
    if plain[0] == ".":  # no hidden names, nor `.` and `..`
        plain = "~2e" + plain[1:]
    if len(plain) > _COMPONENT_CHARS:
        plain = f"{plain[: _COMPONENT_CHARS - 34]}~~{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    return plain


@dataclass(frozen=True)
class KeySpace:
    """Everything besides its tokens that decides a block's bytes. Caches that differ in any of it share no key.

    `version` is the operator's: raise it when a model's weights change under the same name.
    `layout`: how an engine lays out a block's bytes. `rank`: which part of a model that is split over workers.
    """

    model: str
    version: str
    engine: str
    dtype: str
    layout: str
    rank: str

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("the model has no name: blocks of different models would share keys")

    @cached_property
    def prefix(self) -> str:
        """`model/version/engine/dtype/layout/rank/`"""
        return "".join(component(getattr(self, field.name)) + "/" for field in fields(self))

    @property
    def engine_prefix(self) -> str:
        """The part of `prefix` that all layouts and ranks share."""
        return "/".join(self.prefix.split("/")[:3]) + "/"

    def key(self, block: str) -> str:
        """The key of a block, named by its hash, or by a hash and what else tells it apart."""
        return self.prefix + component(block)


def block_hashes(tokens: Sequence[int], block_tokens: int, seed: str = "") -> list[str]:
    """Name the full blocks of a prompt, each by the hash of all tokens up to its end: 64 hexadecimal digits.

    A hash chain: block i's hash covers block i-1's, so equal names mean equal prefixes. A last, partial block has none.
    `seed` sets apart what must not be shared, such as two tenants. Tokens are 0 to 2**32-1.
    """
    if block_tokens < 1:
        raise ValueError(f"a block has at least 1 token, not {block_tokens}")
    layout = struct.Struct(f"<{block_tokens}I")
    digest = hashlib.sha256(b"kvcsfs block chain 1\0" + seed.encode()).digest()
    names = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        digest = hashlib.sha256(digest + layout.pack(*tokens[start : start + block_tokens])).digest()
        names.append(digest.hex())
    return names


def leading_run(hits: Iterable[bool]) -> int:
    """How many hits come before the first miss."""
    run = 0
    for hit in hits:
        if not hit:
            break
        run += 1
    return run


def prefix_hashes(tokens: Sequence[int], lengths: Sequence[int], seed: str = "") -> list[str]:
    """Name prefixes of rising lengths, each by the hash of its tokens: 64 hexadecimal digits."""
    hasher, done, names = hashlib.sha256(b"kvcsfs prefix 1\0" + seed.encode() + b"\0"), 0, []
    for length in lengths:
        hasher.update(struct.pack(f"<{length - done}I", *tokens[done:length]))
        done = length
        names.append(hasher.copy().hexdigest())
    return names
