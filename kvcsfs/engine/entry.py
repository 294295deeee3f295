"""Entry: the index record of one committed value. Plain data; 10 million of them must fit in memory."""

from __future__ import annotations

BLOCK = 4096


def charge(size: int) -> int:
    """Bytes that a value of `size` really takes: padded to whole blocks, and one block of footer."""
    return (size + BLOCK - 1) // BLOCK * BLOCK + BLOCK


class Entry:
    """One committed object.

    Invariant: in the index exactly while it is in the LRU list (`newer` is not None); `pins` counts the leases that
    hold it, also after it left the index.
    """

    __slots__ = (
        "checksum",  # xxh3-128 of the value, 16 bytes
        "created",  # seconds since the epoch
        "generation",
        "hits",
        "key",
        "newer",
        "older",
        "pins",
        "proven",  # False: stored before an unclean stop and not verified since
        "size",  # bytes of the value
        "slot",  # id of the object file
        "temporary",  # under a temporary name: its bytes count, but it is no key for the SDK
        "used",  # seconds since the epoch; unique enough to restore the order of use
    )

    def __init__(
        self,
        key: str,
        slot: int,
        size: int,
        checksum: bytes,
        generation: int,
        created: float,
        temporary: bool = False,
    ) -> None:
        self.key = key
        self.slot = slot
        self.size = size
        self.checksum = checksum
        self.generation = generation
        self.created = created
        self.used = created
        self.hits = 0
        self.pins = 0
        self.proven = True
        self.temporary = temporary
        self.newer: Entry | None = None
        self.older: Entry | None = None

    @property
    def charged(self) -> int:
        """Bytes of the object file."""
        return charge(self.size)

    @property
    def live(self) -> bool:
        """Whether the index still has it."""
        return self.newer is not None

    def __repr__(self) -> str:
        return f"<Entry {self.key!r} slot={self.slot:x} size={self.size} pins={self.pins} live={self.live}>"
