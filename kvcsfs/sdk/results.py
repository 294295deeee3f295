"""The public result and option types. msgspec structs: a batch makes one per key, and they are the cheapest to make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, get_args

import msgspec

if TYPE_CHECKING:
    from mmap import mmap

    # `collections.abc.Buffer` in words of Python 3.11; arrays of numpy and others pass at run time as well
    Buffer: TypeAlias = bytes | bytearray | memoryview | mmap
else:
    Buffer = object

IfExists: TypeAlias = Literal["overwrite", "keep", "error"]


class LLGetItemOpt(msgspec.Struct):
    key: str


class LLPutItem(msgspec.Struct):
    """`value`: one buffer, or a list or tuple of segments that are stored one after the other."""

    key: str
    value: Buffer | Sequence[Buffer]


@dataclass(slots=True)
class LLBatchOptions:
    """Options of one batch.

    `if_exists` is for put; `renew` overrides what a lookup does to recency: None for get yes, query no.
    """

    mountpoint_index: int = 0
    _: KW_ONLY
    if_exists: IfExists = "overwrite"
    renew: bool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.mountpoint_index, bool) or not isinstance(self.mountpoint_index, int):
            raise TypeError(f"mountpoint_index must be an int, not {type(self.mountpoint_index).__name__}")
        if self.if_exists not in get_args(IfExists):
            raise ValueError(
                f"if_exists must be one of {', '.join(get_args(IfExists))}, not {self.if_exists!r}"
            )
        if self.renew is not None and not isinstance(self.renew, bool):
            raise TypeError(f"renew must be True, False or None, not {type(self.renew).__name__}")


# gc=False: they hold nothing that could refer back to them, and a batch of 256 would wake the collector.


class LLQueryResult(msgspec.Struct, gc=False):
    """`status`: ok, not_found, unavailable, timeout or invalid_argument; `total_size` in bytes."""

    key: str
    status: str
    total_size: int
    total_shard: int = 1

    @property
    def exists(self) -> bool:
        return self.status == "ok"


class LLGetResult(msgspec.Struct, gc=False):
    """`status`: > 0 bytes read, 0 a miss, < 0 -errno; `data` belongs to the caller, None unless status > 0."""

    status: int
    data: bytearray | None
    key: str
    size: int


class LLGetIntoResult(msgspec.Struct, gc=False):
    """`status` as in `LLGetResult`; with -ENOSPC and -E2BIG `size` is the value's size."""

    status: int
    size: int
    key: str


class LLPutResult(msgspec.Struct, gc=False):
    """`status`: 0 or -errno. `location` is empty: where a value lies is the daemon's business."""

    status: int
    location: str
    key: str


class LLDeleteResult(int):
    """The status itself, 0 or -errno, that also knows its key."""

    key: str

    def __new__(cls, status: int, key: str) -> Self:
        self = super().__new__(cls, status)
        self.key = key
        return self

    @property
    def status(self) -> int:
        return int(self)

    def __repr__(self) -> str:
        return f"LLDeleteResult(status={int(self)}, key={self.key!r})"
