"""Key syntax: what a key may be, the directories it lies in, and which names are temporary.

A directory is written with its trailing slash: "" is the root, "a/b/" the directory of "a/b/c". So the keys below
a directory are those that start with it, whatever components (empty ones too) a key has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from kvcsfs.errors import InvalidKeyError, KeyTooLongError

MAX_KEY_BYTES = 1024

# Names that engines give to files they haven't finished: SGLang `.<hex>.tmp`, LMCache `<name>.tmp` and
# `<name>.tmp<8 characters>`, vLLM `<name>.bin_<digits>.tmp` and its O_DIRECT probe, llm-d `<name>_<digits>.tmp`.
_TEMPORARY = re.compile(r"(?:.*\.tmp(?:.{8})?|\.o_direct_probe_.*)", re.DOTALL)


def check(key: str) -> None:
    """Raise InvalidKeyError or KeyTooLongError unless a value can be stored under `key`."""
    if key.isascii() and 0 < len(key) <= MAX_KEY_BYTES and "\0" not in key:  # nearly every key, cheaply
        return
    if not key:
        raise InvalidKeyError("the key is empty, expected 1 to 1024 bytes")
    if "\0" in key:
        raise InvalidKeyError("the key has a NUL, expected UTF-8 without it")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise InvalidKeyError("the key isn't UTF-8") from None
    if size > MAX_KEY_BYTES:
        raise KeyTooLongError(f"the key has {size} bytes, expected at most {MAX_KEY_BYTES}")


def are_plain(names: Sequence[str]) -> bool:
    """Whether all keys surely pass `check` and are no temporary names: nearly every batch, by one look at all."""
    text = "/".join(names)
    return (
        text.isascii()
        and all(names)
        and max(map(len, names), default=0) <= MAX_KEY_BYTES
        and not ("\0" in text or "tmp" in text or "probe" in text)
    )


def is_temporary(key: str) -> bool:
    """Whether the last component is the name of a file still being written: no key for the SDK."""
    if "tmp" not in key and "probe" not in key:  # nearly every key, cheaply
        return False
    return _TEMPORARY.fullmatch(key, key.rfind("/") + 1) is not None


def directory(key: str) -> str:
    """The directory of a key, or the parent of a directory that has its trailing slash cut."""
    return key[: key.rfind("/") + 1]


def parents(key: str) -> Iterator[str]:
    """Yield every directory that `key` lies in, from the nearest to the root."""
    end = key.rfind("/")
    while end >= 0:
        yield key[: end + 1]
        end = key.rfind("/", 0, end)
    yield ""
