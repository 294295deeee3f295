"""What the client itself can say about keys, before anything is sent."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

from kvcsfs.sdk.transfer import PENDING


def keys_of(items: Sequence[Any], what: str) -> list[str]:
    """The keys of items. Raises TypeError if one has none, or it is no string."""
    try:
        return check_types([item.key for item in items])
    except AttributeError:
        raise TypeError(f"items must be a sequence of {what}") from None


def check_types(keys: Sequence[str]) -> list[str]:
    if isinstance(keys, str):
        raise TypeError("keys must be a sequence of str, not one str")
    keys = list(keys)
    if set(map(type, keys)) <= {str}:
        return keys
    for key in keys:
        if not isinstance(key, str):
            raise TypeError(f"a key must be a str, not {type(key).__name__}")
    return [str(key) for key in keys]  # of a subclass, which msgpack can't encode


def check_keys(keys: list[str], max_bytes: int) -> list[int]:
    """A status a key: PENDING for one to ask the daemon about, else -errno."""
    text = "".join(keys)
    # in one go for what nearly all batches are; ASCII characters are bytes
    if text.isascii() and "\0" not in text and max(map(len, keys), default=0) <= max_bytes and "" not in keys:
        return [PENDING] * len(keys)
    return [_check(key, max_bytes) for key in keys]


def _check(key: str, max_bytes: int) -> int:
    try:
        size = len(key.encode())
    except UnicodeEncodeError:  # a lone surrogate
        return -errno.EINVAL
    if not size or "\0" in key:
        return -errno.EINVAL
    return PENDING if size <= max_bytes else -errno.ENAMETOOLONG
