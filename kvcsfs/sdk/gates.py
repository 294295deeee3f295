"""A bounded amount that the calls of one client share: received descriptors, bytes reserved."""

from __future__ import annotations

import threading

from kvcsfs.sdk.deadline import Deadline


class Gate:
    """Invariant: 0 <= free <= limit once everything taken was given back."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free = limit
        self._changed = threading.Condition(threading.Lock())

    def take(self, amount: int, deadline: Deadline) -> int:
        """Take so much, or the whole limit if it is more; return what was taken, 0 if the deadline passed first."""
        amount = min(amount, self.limit)
        with self._changed:
            while self._free < amount:
                seconds = deadline.lock_seconds()
                if seconds == 0 or not self._changed.wait(None if seconds < 0 else seconds):
                    return 0
            self._free -= amount
        return amount

    def try_take(self, amount: int) -> int:
        """`take` without waiting."""
        amount = min(amount, self.limit)
        with self._changed:
            if self._free < amount:
                return 0
            self._free -= amount
        return amount

    def give(self, amount: int) -> None:
        with self._changed:
            self._free += amount
            self._changed.notify_all()
