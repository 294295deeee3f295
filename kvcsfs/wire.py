"""The protocol of the socket: messages, frames and how descriptors travel. No I/O; shared by both sides.

A frame is a little-endian u32, the length of its payload, and the payload: one msgpack array `[tag, fields...]`.
Requests and replies carry `id` first; a reply repeats the id of its request. Lists of a batch are columns in key
order: position i of each belongs to key i. A status is > 0 (a size or a token), 0 (a miss, or done), or -errno.

Descriptors go by SCM_RIGHTS (unix(7)) on the first byte of the frame that announces them, at most `FDS_PER_FRAME`.
`docs/protocol.md` is the text for people; `tests/vectors/` holds golden frames.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kvcsfs.errors import InvalidKeyError, KvcsError, ProtocolError

PROTOCOL_VERSION = 1
HEADER_BYTES = 4
MAX_FRAME_BYTES = 4 << 20  # 256 keys of 1,024 bytes with room for a listing
MAX_KEYS = 1024  # keys of one request
MAX_KEY_BYTES = 1024
MAX_VALUE_BYTES = 4 << 30
FDS_PER_FRAME = 253  # SCM_MAX_FD of the kernel, unix(7)
CHECKSUM_BYTES = 16  # xxh3-128, big-endian digest

UNPROVEN = 1  # flag of an opened object: stored before an unclean stop, the reader must verify it


class Message(msgspec.Struct, array_like=True):
    """Base of every message: an array headed by its tag. Fields at the end that we don't know are ignored."""

    id: int


class Hello(Message, tag="hello"):
    """First frame of a client. `max_fds`: how many received descriptors it can hold at once."""

    version: int
    client: str
    max_fds: int


class MountpointInfo(msgspec.Struct, array_like=True):
    """What a client must know of a mountpoint to cut its batches and to read.

    `in_memory`: its file system lives in memory, a read never waits for a disk. `align`: 0 for buffered I/O, else
    the alignment in bytes that direct I/O needs of addresses, offsets and sizes.
    """

    index: int
    capacity: int
    in_memory: bool = False
    align: int = 0


class HelloReply(Message, tag="hello_reply"):
    version: int
    server: str
    backend: str  # "direct": the mountpoint index is ignored; "pooled"
    max_frame: int
    max_keys: int
    mountpoints: list[MountpointInfo]


class Failure(Message, tag="failure"):
    """The whole request failed; with id 0 the connection is closed after it."""

    errno: int
    message: str


class Query(Message, tag="query"):
    mountpoint: int
    keys: list[str]
    renew: bool = False


class QueryReply(Message, tag="query_reply"):
    sizes: list[int]  # > 0 the value's size, 0 a miss


class Open(Message, tag="open"):
    """Look keys up, pin what is found, and send a read-only descriptor for each hit."""

    mountpoint: int
    keys: list[str]
    renew: bool = True


class OpenReply(Message, tag="open_reply"):
    """Keys `first` .. `first + len(sizes) - 1` of the request; the hits' descriptors come with the frame, in order.

    `lease` holds the pins of the whole request, 0 if there are none. `more`: another such frame follows.
    """

    lease: int
    first: int
    sizes: list[int]  # > 0 the value's size, 0 a miss, -errno
    checksums: bytes  # 16 a hit, in order
    flags: bytes  # 1 a hit, in order
    more: bool = False


class Release(Message, tag="release"):
    """One way: give a lease's pins back. The id is 0."""

    lease: int


class Reserve(Message, tag="reserve"):
    """Take capacity and a staged object for each key; writable descriptors come back.

    `ttl_seconds`: after that the daemon gives the reservation up; 0 for its own limit.
    """

    mountpoint: int
    keys: list[str]
    sizes: list[int]
    if_exists: str = "overwrite"  # or "keep", "error": both answer -EEXIST
    ttl_seconds: float = 0.0


class ReserveReply(Message, tag="reserve_reply"):
    """Like `OpenReply`: a slice of the batch, with a write-only descriptor for each token, in order."""

    first: int
    tokens: list[int]  # > 0 the reservation, or -errno
    more: bool = False


class Commit(Message, tag="commit"):
    """Publish what was written. The client has closed its descriptors before."""

    tokens: list[int]
    checksums: bytes  # 16 a token, in order
    if_exists: str = "overwrite"


class CommitReply(Message, tag="commit_reply"):
    statuses: list[int]


class Abort(Message, tag="abort"):
    """One way: give reservations back. The id is 0."""

    tokens: list[int]


class Delete(Message, tag="delete"):
    mountpoint: int
    keys: list[str]


class DeleteReply(Message, tag="delete_reply"):
    statuses: list[int]


class Check(Message, tag="check"):
    """These keys failed the client's verification; the daemon reads them itself and drops what is wrong."""

    mountpoint: int
    keys: list[str]


class CheckReply(Message, tag="check_reply"):
    statuses: list[int]  # 0 dropped or absent, > 0 the value's size: it is right


class Usage(Message, tag="usage"):
    mountpoint: int
    prefix: str = ""


class UsageReply(Message, tag="usage_reply"):
    entries: int
    value_bytes: int
    charged_bytes: int  # with padding and footers


class List(Message, tag="list"):
    """Keys with `prefix` and greater than `after`, in order; at most `limit`."""

    mountpoint: int
    prefix: str = ""
    after: str = ""
    limit: int = 1000


class ListedEntry(msgspec.Struct, array_like=True):
    key: str
    size: int
    created: float  # seconds since the epoch
    checksum: bytes


class ListReply(Message, tag="list_reply"):
    entries: list[ListedEntry]
    more: bool


class Evict(Message, tag="evict"):
    """Evict least recently used entries: below `prefix`, until `target_bytes` charged bytes are freed; 0 for all."""

    mountpoint: int
    prefix: str = ""
    target_bytes: int = 0


class Remove(Message, tag="remove"):
    """Delete every key with the prefix."""

    mountpoint: int
    prefix: str


class EvictReply(Message, tag="evict_reply"):
    entries: int
    charged_bytes: int


class Verify(Message, tag="verify"):
    """Read the values of the keys greater than `after`, until `limit_bytes` are read; drop what is wrong."""

    mountpoint: int
    after: str = ""
    limit_bytes: int = 0


class VerifyReply(Message, tag="verify_reply"):
    entries: int
    size_bytes: int
    dropped: list[str]
    last: str  # the next step goes on after this key
    more: bool


class Status(Message, tag="status"):
    pass


class StatusReply(Message, tag="status_reply"):
    status: dict[str, Any]


Request = (
    Hello
    | Query
    | Open
    | Release
    | Reserve
    | Commit
    | Abort
    | Delete
    | Check
    | Usage
    | List
    | Evict
    | Remove
    | Verify
    | Status
)
Reply = (
    HelloReply
    | Failure
    | QueryReply
    | OpenReply
    | ReserveReply
    | CommitReply
    | DeleteReply
    | CheckReply
    | UsageReply
    | ListReply
    | EvictReply
    | VerifyReply
    | StatusReply
)

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)
_plain = msgspec.msgpack.Decoder(list[Any])


def encode(message: Message) -> bytearray:
    """Return the whole frame of a message.

    Raises:
        InvalidKeyError: a text that isn't UTF-8. ProtocolError: a number over 64 bits, or the frame would pass
            `MAX_FRAME_BYTES`. Nothing was sent.
    """
    frame = bytearray(HEADER_BYTES)
    try:
        _encoder.encode_into(message, frame, HEADER_BYTES)
    except UnicodeEncodeError:
        raise InvalidKeyError("the key isn't UTF-8") from None
    except OverflowError:
        raise ProtocolError("a number has more than 64 bits") from None
    size = len(frame) - HEADER_BYTES
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {size} B is over the limit of {MAX_FRAME_BYTES} B")
    _LENGTH.pack_into(frame, 0, size)
    return frame


class UnknownRequest(Exception):
    """A well-formed request whose tag we don't know; answered with EOPNOTSUPP, the connection goes on."""

    def __init__(self, tag: str, request_id: int) -> None:
        super().__init__(f"unknown request {tag!r}")
        self.request_id = request_id


def decode_request(payload: bytes | memoryview) -> Request:
    """Decode one request.

    Raises:
        UnknownRequest: its tag is none of ours. ProtocolError: anything else.
    """
    try:
        return _requests.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        known = {r.__struct_config__.tag for r in Request.__args__}
        try:
            tag, request_id = _plain.decode(payload)[:2]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
            raise ProtocolError(f"a payload that is no request: {exc}") from exc
        if isinstance(tag, str) and tag not in known and isinstance(request_id, int):
            raise UnknownRequest(tag, request_id) from None
        raise ProtocolError(f"a payload that is no request: {exc}") from exc


def decode_reply(payload: bytes | memoryview) -> Reply:
    """Decode one reply. Raises ProtocolError for anything else."""
    try:
        return _replies.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"a payload that is no reply: {exc}") from exc


class FrameBuffer:
    """Cuts a stream of bytes into payloads of at most `limit` bytes."""

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self.limit = limit
        self._data = bytearray()

    @property
    def is_partial(self) -> bool:
        """Whether the beginning of a frame waits for its rest."""
        return bool(self._data)

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Take bytes as they came and yield each payload that is now whole.

        Raises:
            ProtocolError: a length over the limit; the stream can't be read further.
        """
        self._data += data
        start = 0
        try:
            while len(self._data) - start >= HEADER_BYTES:
                (size,) = _LENGTH.unpack_from(self._data, start)
                if size > self.limit:
                    raise ProtocolError(f"a frame of {size} B is over the limit of {self.limit} B")
                end = start + HEADER_BYTES + size
                if len(self._data) < end:
                    return
                payload = bytes(self._data[start + HEADER_BYTES : end])
                start = end
                yield payload
        finally:
            del self._data[:start]


def errno_of(exc: KvcsError) -> int:
    """The status that stands for a failure in a frame."""
    return -exc.errno


def fd_slices(counts: Sequence[bool], limit: int = FDS_PER_FRAME) -> Iterator[tuple[int, int]]:
    """Cut positions into runs `(first, end)` that carry at most `limit` descriptors each; one empty run for none."""
    first = held = 0
    for i, has_fd in enumerate(counts):
        if has_fd and held == limit:
            yield first, i
            first, held = i, 0
        held += has_fd
    yield first, len(counts)
