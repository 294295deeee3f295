"""Whatever bytes they are given, the parsers give a result or the error that they promise, never another."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvcsfs import config, wire
from kvcsfs.engine import footer, recovery
from kvcsfs.errors import ConfigError, ProtocolError

pytestmark = pytest.mark.property

EXAMPLES = int(os.environ.get("KVCSFS_EXAMPLES", "300"))
FRAMES = [
    bytes.fromhex(v["frame"])
    for v in json.loads((Path(__file__).parents[1] / "vectors" / "frames.json").read_text())
]
often = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def damaged(draw: st.DrawFn, sources: list[bytes]) -> bytes:
    """A valid text with bytes changed, cut out, doubled or put in."""
    data = bytearray(draw(st.sampled_from(sources)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 8)))
        new = draw(st.one_of(st.binary(max_size=8), st.just(bytes(data[at:end]) * 2)))
        data[at:end] = new
    return bytes(data)


@often
@given(st.one_of(st.binary(max_size=200), damaged([f[4:] for f in FRAMES])))
def test_a_request(payload):
    with contextlib.suppress(ProtocolError, wire.UnknownRequest):
        assert isinstance(wire.decode_request(payload), wire.Message)


@often
@given(st.one_of(st.binary(max_size=200), damaged([f[4:] for f in FRAMES])))
def test_a_reply(payload):
    with contextlib.suppress(ProtocolError):
        assert isinstance(wire.decode_reply(payload), wire.Message)


@often
@given(damaged([b"".join(FRAMES)]), st.lists(st.integers(1, 500), max_size=20))
def test_a_stream_gives_the_same_however_it_is_cut(stream, cuts):
    def frames(pieces: list[bytes]) -> list[bytes]:
        buffer = wire.FrameBuffer()
        found: list[bytes] = []
        try:
            for piece in pieces:
                found.extend(buffer.feed(piece))
        except ProtocolError:
            found.append(b"over the limit")
        return found

    pieces, at = [], 0
    for cut in cuts:
        pieces.append(stream[at : at + cut])
        at += cut
    assert frames([*pieces, stream[at:]]) == frames([stream])


FOOTERS = [
    footer.pack(key, size, 1 << 40, 1e9, bytes(16))
    for key, size in (("a", 1), ("m/v1/" + "x" * 1000, 1 << 32), ("ä" * 500, 5))
]


@often
@given(st.one_of(st.binary(max_size=100), damaged(FOOTERS)), st.booleans())
def test_a_footer(block, sealed):
    block = block[: footer.BLOCK].ljust(footer.BLOCK, b"\0")
    if sealed:  # with a checksum that fits, so that what is behind it is parsed too
        body = block[:-8]
        block = body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
    try:
        found = footer.parse(block)
    except footer.NewerFormat:
        return
    if found is not None:
        assert (len(found.key.encode()) <= 1024, found.size >= 0) == (True, True)


CONFIGS = [
    (Path(__file__).parents[2] / "systemd" / "kvcsfs.toml").read_bytes(),
    b'[[mountpoints]]\npath="/tmp"\ncapacity="1GiB"\n[[access]]\nprefix="a/"\nusers=["*"]\nread=false\n',
]


@often
@given(st.one_of(st.binary(max_size=300), damaged(CONFIGS)))
def test_a_configuration(tmp_path, text):
    file = tmp_path / "kvcsfs.toml"
    file.write_bytes(text)
    message = ""
    try:
        assert isinstance(config.load(file, {}), config.Config)
    except ConfigError as exc:
        message = str(exc)
    assert "\n" not in message


SNAPSHOT = b"".join(
    len(block).to_bytes(4, "little") + xxhash.xxh3_64_digest(block) + block
    for block in (
        msgspec.msgpack.encode([("k", 1, 5, bytes(16), 1 << 40, 1.0, 1.0, 0, 0)]),
        b"",
        msgspec.msgpack.encode(recovery.Tail(1, 1, "boot", True, [(1, 8192)], {})),
    )
)


LAST_TOO_LONG = bytearray(SNAPSHOT)
LAST_TOO_LONG[78] = 1  # of the last block's length: 256 bytes more than are there


@often
@given(damaged([SNAPSHOT]))
@example(bytes(LAST_TOO_LONG))
def test_a_snapshot(tmp_path, expected_warnings, content):
    expected_warnings[:] = ["the footers are read instead"]  # one, however many examples
    (tmp_path / "snapshot").write_bytes(content)
    root = os.open(tmp_path, os.O_RDONLY)
    found = recovery.read_snapshot(root, tmp_path, recovery.Watch())
    os.close(root)
    assert found is None or content == SNAPSHOT or found[0] == []
