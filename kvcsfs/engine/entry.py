"""Entry: the index record of one committed value. Plain data; 10 million of them must fit in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcsfs.engine.keys import is_temporary

if TYPE_CHECKING:
    from kvcsfs.engine.index import Directory

BLOCK = 4096
UNPROVEN = 1  # stored before an unclean stop and not verified since; readers must verify it
SOLE = 4  # the kernel proved at its commit that nobody has it open, and no descriptor was given out since
TEMPORARY = 2  # under a temporary name: its bytes count, but it is no key for the SDK


def charge(size: int) -> int:
    """Bytes that a value of `size` really takes: padded to whole blocks, and one block of footer."""
    return (size + 2 * BLOCK - 1) & -BLOCK


def flags_of(key: str) -> int:
    """The flags that follow from a key."""
    return TEMPORARY if is_temporary(key) else 0


# One pair of int objects for all entries of a size: in most stores nearly all have the same.
KNOWN_SIZES = 4096
_SIZES: dict[int, tuple[int, int]] = {}


class Entry:
    """One committed object.

    Invariant: in the index exactly while it is in the LRU list (`newer` is not None); `pins` counts the leases that
    hold it, also after it left the index.
    """

    __slots__ = (
        "charged",  # bytes of the object file
        "checksum",  # xxh3-128 of the value, 16 bytes
        "created",  # seconds since the epoch
        "directory",  # the index's counters for it, while it is in there
        "flags",  # UNPROVEN, TEMPORARY, SOLE
        "generation",
        "hits",
        "key",
        "newer",
        "older",
        "pins",
        "size",  # bytes of the value
        "slot",  # id of the object file
        "used",  # seconds since the epoch; one object for a whole batch
    )

    def __init__(
        self,
        key: str,
        slot: int,
        size: int,
        checksum: bytes,
        generation: int,
        created: float,
        flags: int = 0,
    ) -> None:
        self.key = key
        self.flags = flags
        self.slot = slot
        self.resize(size)
        self.checksum = checksum
        self.generation = generation
        self.created = created
        self.used = created
        self.hits = 0
        self.pins = 0
        self.directory: Directory | None = None
        self.newer: Entry | None = None
        self.older: Entry | None = None

    def rename(self, key: str) -> None:
        """Take another key; whether it is a temporary name follows from it."""
        self.key = key
        self.flags = self.flags & ~TEMPORARY | flags_of(key)

    def resize(self, size: int) -> None:
        """Take a size, and the charge that follows from it. Only of an entry that isn't in the index."""
        try:
            self.size, self.charged = _SIZES[size]
        except KeyError:
            if len(_SIZES) >= KNOWN_SIZES:
                _SIZES.clear()
            self.size, self.charged = _SIZES[size] = (size, charge(size))

    @property
    def proven(self) -> bool:
        """Whether its bytes need no verification before they are served."""
        return not self.flags & UNPROVEN

    @property
    def temporary(self) -> bool:
        """Whether it is no key for the SDK."""
        return bool(self.flags & TEMPORARY)

    @property
    def live(self) -> bool:
        """Whether the index still has it."""
        return self.newer is not None

    def __repr__(self) -> str:
        return f"<Entry {self.key!r} slot={self.slot:x} size={self.size} pins={self.pins} live={self.live}>"
