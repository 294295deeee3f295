from __future__ import annotations

import struct

import pytest
import xxhash

from kvcsfs.engine import footer
from kvcsfs.engine.entry import BLOCK


def block(key: str = "m/a", version: int = footer.FORMAT) -> bytes:
    """A footer of any format, packed by hand from docs/format.md."""
    name = key.encode()
    head = (
        b"KVCSFOOT"
        + struct.pack("<IIQQQ", version, len(name), 5000, 7, 1_500_000_000_000_000_000)
        + b"c" * 16
    )
    body = (head + name).ljust(BLOCK - 8, b"\0")
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def test_the_bytes_are_those_of_the_format():
    packed = footer.pack("m/ü", 5000, 7, 1_500_000_000.0, b"c" * 16)
    assert packed == block("m/ü")
    assert len(packed) == BLOCK


def test_a_footer_says_what_was_packed():
    assert footer.parse(block()) == footer.Footer("m/a", 5000, 7, 1_500_000_000.0, b"c" * 16)


def test_the_longest_key_fits():
    parsed = footer.parse(footer.pack("ü" * 512, 1, 1, 0.0, bytes(16)))
    assert parsed is not None
    assert parsed.key == "ü" * 512


@pytest.mark.parametrize("at", [0, 8, 12, 16, 24, 32, 40, 56, 58, 60, 2000, BLOCK - 8, BLOCK - 1])
def test_one_changed_byte_makes_it_void(at):
    torn = bytearray(block())
    torn[at] ^= 1
    assert footer.parse(bytes(torn)) is None


@pytest.mark.parametrize("kept", [0, 8, 512, 2048, BLOCK - 512])
def test_a_footer_of_which_a_part_was_written_is_void(kept):
    assert footer.parse(block("x" * 1000)[:kept].ljust(BLOCK, b"\0")) is None


@pytest.mark.parametrize("data", [footer.VOID, b"", b"KVCSFOOT", b"\xff" * BLOCK, block()[:-1]])
def test_void_and_foreign_blocks(data):
    assert footer.parse(data) is None


def test_a_newer_format_is_told_from_garbage():
    with pytest.raises(footer.NewerFormat, match="format 2"):
        footer.parse(block(version=2))


def test_a_key_that_is_no_text_is_void():
    name = b"\xff\xfe"
    body = (b"KVCSFOOT" + struct.pack("<IIQQQ", 1, 2, 1, 1, 1) + bytes(16) + name).ljust(BLOCK - 8, b"\0")
    assert footer.parse(body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))) is None
