"""Byte accounting of one mountpoint."""

from __future__ import annotations


class Ledger:
    """Where the bytes of one mountpoint are. Plain counters: the catalog moves bytes between them.

    Invariant: committed, reserved, retired, free_slots >= 0. Their sum <= capacity, but for what was there already
    when the capacity was set lower; nothing is added until it fits again.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.committed = 0
        self.reserved = 0  # promised to staged objects
        self.retired = 0  # left the index, not reclaimed yet: still open somewhere, or on the way
        self.free_slots = 0  # files kept to be written again

    @property
    def used(self) -> int:
        """Bytes of all files."""
        return self.committed + self.reserved + self.retired + self.free_slots

    @property
    def free(self) -> int:
        """Bytes that nothing holds."""
        return self.capacity - self.committed - self.reserved - self.retired - self.free_slots

    def check(self) -> None:
        """Assert the invariant."""
        for name in ("committed", "reserved", "retired", "free_slots"):
            assert getattr(self, name) >= 0, name
