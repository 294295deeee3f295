"""Frames: the golden ones of tests/vectors/, cutting of streams, and what garbage gives."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcsfs import wire
from kvcsfs.errors import InvalidKeyError, ProtocolError

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "frames.json").read_text()
)
REQUESTS = {m.__struct_config__.tag: m for m in wire.Request.__args__}
REPLIES = {m.__struct_config__.tag: m for m in wire.Reply.__args__}


def from_json(value: Any) -> Any:
    """A field as the vectors write it: bytes as {"hex": ...}, a nested struct as the list of its fields."""
    if isinstance(value, dict) and set(value) == {"hex"}:
        return bytes.fromhex(value["hex"])
    return [from_json(v) for v in value] if isinstance(value, list) else value


def message_of(vector: dict[str, Any]) -> wire.Message:
    kind = (REQUESTS | REPLIES)[vector["message"]]
    message: wire.Message = msgspec.convert(
        [vector["message"], *map(from_json, vector["fields"].values())], kind
    )
    return message


def names(vector: dict[str, Any]) -> str:
    return f"{vector['message']}: {vector['about']}"


@pytest.mark.parametrize("vector", VECTORS, ids=names)
def test_encoding_gives_the_golden_frame(vector):
    assert wire.encode(message_of(vector)).hex() == vector["frame"]


@pytest.mark.parametrize("vector", VECTORS, ids=names)
def test_decoding_gives_the_fields(vector):
    (payload,) = wire.FrameBuffer().feed(bytes.fromhex(vector["frame"]))
    decode = wire.decode_request if vector["message"] in REQUESTS else wire.decode_reply
    message = decode(payload)
    assert message == message_of(vector)
    assert list(message.__struct_fields__) == list(vector["fields"])


@pytest.mark.parametrize("vector", VECTORS, ids=names)
def test_a_client_needs_msgpack_alone(vector):
    frame = bytes.fromhex(vector["frame"])
    assert int.from_bytes(frame[:4], "little") == len(frame) - 4
    tag, *fields = msgspec.msgpack.decode(frame[4:])
    assert tag == vector["message"]
    assert fields == [from_json(v) for v in vector["fields"].values()]


def test_every_message_has_a_golden_frame():
    assert {v["message"] for v in VECTORS} == set(REQUESTS) | set(REPLIES)


# -- streams


def test_a_stream_is_cut_wherever_it_was_split():
    stream = b"".join(bytes.fromhex(v["frame"]) for v in VECTORS)
    whole = list(wire.FrameBuffer().feed(stream))
    assert len(whole) == len(VECTORS)
    dice = random.Random(1)
    buffer, i = wire.FrameBuffer(), 0
    cut: list[bytes] = []
    while i < len(stream):
        step = dice.randint(1, 40)
        cut += buffer.feed(stream[i : i + step])
        i += step
    assert cut == whole


def test_an_empty_payload_is_a_frame():
    assert list(wire.FrameBuffer().feed(bytes(8))) == [b"", b""]


def test_a_frame_over_the_limit_ends_the_stream_after_what_came_before():
    limit = wire.MAX_FRAME_BYTES
    buffer = wire.FrameBuffer()
    frames = buffer.feed(b"\1\0\0\0x" + (limit + 1).to_bytes(4, "little"))
    assert next(frames) == b"x"
    with pytest.raises(ProtocolError, match=f"over the limit of {limit}"):
        next(frames)
    assert list(wire.FrameBuffer().feed(limit.to_bytes(4, "little") + bytes(limit))) == [bytes(limit)]


def test_a_message_over_the_limit_is_not_encoded():
    with pytest.raises(ProtocolError, match="over the limit"):
        wire.encode(wire.Query(1, 0, ["x" * wire.MAX_FRAME_BYTES]))


@pytest.mark.parametrize("message", [wire.Delete(2, 0, ["\udcff"]), wire.Usage(2, 0, "\udcff")])
def test_a_key_that_is_no_utf8_is_the_callers_error(message):
    with pytest.raises(InvalidKeyError, match="UTF-8"):
        wire.encode(message)


@pytest.mark.parametrize("message", [wire.Usage(2, 1 << 70), wire.Evict(2, 0, "", -(1 << 70))])
def test_a_number_over_64_bits_is_one_clear_error(message):
    with pytest.raises(ProtocolError, match="64 bits"):
        wire.encode(message)


# -- what isn't ours


def pack(*items: Any) -> bytes:
    return msgspec.msgpack.encode(list(items))


def test_fields_that_we_do_not_know_are_ignored():
    assert wire.decode_request(pack("query", 5, 0, ["a"], True, "new", 1)) == wire.Query(5, 0, ["a"], True)
    assert wire.decode_reply(pack("query_reply", 5, [1], {"new": 1})) == wire.QueryReply(5, [1])


def test_fields_at_the_end_have_their_defaults():
    assert wire.decode_request(pack("open", 5, 0, ["a"])) == wire.Open(5, 0, ["a"], True)


def test_an_unknown_request_is_told_with_its_id():
    with pytest.raises(wire.UnknownRequest, match="unknown request 'teleport'") as caught:
        wire.decode_request(pack("teleport", 9, "x"))
    assert caught.value.request_id == 9


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93",
        pack(),
        pack("query"),
        pack("teleport"),
        pack("teleport", "x"),
        pack("query", "x", 0, []),
        pack("query", 1, 0, "a"),
        pack("query", 1, 0, [b"a"]),
        pack("query", 1, 0, [None]),
        pack("commit", 1, ["x"], b""),
        pack(1, 2),
        msgspec.msgpack.encode({"query": 1}),
        msgspec.msgpack.encode("query"),
        b"\x94\xa5query\x01\x00\x91\xa1\xff",  # a key that isn't UTF-8
        b"\x91" * 5000,
        pack("query", 1, 0, ["a"]) + b"\0",
    ],
)
def test_garbage_is_a_protocol_error(payload):
    with pytest.raises(ProtocolError, match="no request"):
        wire.decode_request(payload)
    with pytest.raises(ProtocolError, match="no reply"):
        wire.decode_reply(payload)


def test_a_request_is_no_reply():
    with pytest.raises(ProtocolError):
        wire.decode_reply(pack("query", 1, 0, ["a"]))


# -- slices of a batch


@pytest.mark.parametrize(
    ("counts", "slices"),
    [
        ([], [(0, 0)]),
        ([False] * 5, [(0, 5)]),
        ([True] * 2, [(0, 2)]),
        ([True] * 3, [(0, 2), (2, 3)]),
        ([True, True, False, False], [(0, 4)]),
        ([False, True, False, True, False, True], [(0, 5), (5, 6)]),
    ],
)
def test_at_most_so_many_descriptors_a_slice(counts, slices):
    assert list(wire.fd_slices(counts, 2)) == slices
