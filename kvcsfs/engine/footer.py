"""The footer: the last 4,096 bytes of an object file, which say whose it is. `docs/format.md` is the text for people.

Little-endian: magic, format, key length, value size, generation, creation time in ns, xxh3-128 of the value, the
key, zeros, and xxh3-64 of all before. A footer of zeros (void) marks a free slot.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from kvcsfs.engine.entry import BLOCK, Entry

MAGIC = b"KVCSFOOT"
FORMAT = 1
VOID = bytes(BLOCK)
_HEAD = struct.Struct("<8sIIQQQ16s")
_SUM = struct.Struct("<Q")
_BODY = BLOCK - _SUM.size
_PADDED = struct.Struct(f"{_HEAD.format}{_BODY - _HEAD.size}s")
_SUMMED = struct.Struct(f"<{_BODY}sQ")
_new = tuple.__new__


class NewerFormat(ValueError):
    """A footer that a newer version of kvcsfs wrote."""


class Footer(NamedTuple):
    """What a footer says. A tuple: a scan makes one for each value of the store."""

    key: str
    size: int
    generation: int
    created: float
    checksum: bytes


def pack(key: str, size: int, generation: int, created: float, checksum: bytes) -> bytes:
    """The 4,096 bytes of a footer."""
    name = key.encode()
    body = _PADDED.pack(MAGIC, FORMAT, len(name), size, generation, int(created * 1e9), checksum, name)
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def of(entry: Entry) -> bytes:
    """The footer of an entry."""
    return pack(entry.key, entry.size, entry.generation, entry.created, entry.checksum)


def parse(block: bytes) -> Footer | None:
    """Read a footer; None for a void, torn or foreign one. Raises NewerFormat."""
    if len(block) != BLOCK:
        return None
    body, told = _SUMMED.unpack(block)
    if told != xxhash.xxh3_64_intdigest(body):
        return None
    magic, version, length, size, generation, created, checksum = _HEAD.unpack_from(body)
    if magic != MAGIC:
        return None
    if version > FORMAT:
        raise NewerFormat(f"footer of format {version}, this version reads up to {FORMAT}")
    if not 0 < length <= _BODY - _HEAD.size:
        return None
    try:
        key = body[_HEAD.size : _HEAD.size + length].decode()
    except UnicodeDecodeError:
        return None
    # The class's own constructor takes a third of the time of all this (measured).
    return _new(Footer, (key, size, generation, created / 1e9, checksum))
