from __future__ import annotations

import pytest

from kvcsfs.engine import keys
from kvcsfs.errors import InvalidKeyError, KeyTooLongError


@pytest.mark.parametrize("key", ["a", "a/b", "/", "a//b/", ".", "..", "ü" * 512, "x" * 1024, "a\nb", "a%b"])
def test_good_keys(key):
    keys.check(key)


@pytest.mark.parametrize("key", ["", "a\0b", "\ud800"])
def test_bad_keys(key):
    with pytest.raises(InvalidKeyError):
        keys.check(key)


@pytest.mark.parametrize("key", ["x" * 1025, "ü" * 513])
def test_the_limit_counts_bytes(key):
    with pytest.raises(KeyTooLongError, match="at most 1024"):
        keys.check(key)


@pytest.mark.parametrize(
    "key",
    [
        ".3f2a.tmp",
        "m/x.tmp",
        "m/x.tmpAbCdEf12",
        "m/00.bin_12345.tmp",
        "m/.o_direct_probe_1",
        ".tmp",
        "a/.tmp12345678",
    ],
)
def test_temporary_names(key):
    assert keys.is_temporary(key)


@pytest.mark.parametrize(
    "key", ["m/x", "x.tmp/y", "x.tmp1234567", "x.tmp123456789", "o_direct_probe_1", "tmp", "xtmp"]
)
def test_other_names(key):
    assert not keys.is_temporary(key)


@pytest.mark.parametrize(
    ("key", "parents"),
    [
        ("a", [""]),
        ("a/b/c", ["a/b/", "a/", ""]),
        ("a//b", ["a//", "a/", ""]),
        ("/a", ["/", ""]),
        ("a/", ["a/", ""]),
    ],
)
def test_parents(key, parents):
    assert list(keys.parents(key)) == parents
    assert keys.directory(key) == parents[0]
