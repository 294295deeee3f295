"""The end of a call on the monotonic clock, in the forms that locks and poll want."""

from __future__ import annotations

import math
import sys
import threading
from time import monotonic


def check_seconds(name: str, seconds: float) -> float:
    """Return the seconds as a plain float, which goes into a message; 0 as infinity.

    Raises:
        TypeError: not a number. ValueError: negative or not a number at all.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"{name} must be a number of seconds, not {type(seconds).__name__}")
    if not seconds >= 0:  # NaN as well
        raise ValueError(f"{name} must be 0 or more seconds, not {seconds}")
    return float(seconds) if 0 < seconds <= sys.float_info.max else math.inf


def wait_seconds(seconds: float | None) -> float | None:
    """How long a caller wants to wait, for `Condition.wait` and `Thread.join`, which refuse infinity."""
    return None if seconds is None or seconds > threading.TIMEOUT_MAX else seconds


class Deadline:
    __slots__ = ("end",)

    def __init__(self, seconds: float = math.inf) -> None:
        self.end = monotonic() + seconds

    def remaining(self) -> float:
        return max(0.0, self.end - monotonic())

    def passed(self) -> bool:
        return monotonic() >= self.end

    def sooner(self, seconds: float) -> Deadline:
        """This end, or the one in so many seconds if that comes first."""
        return Deadline(min(seconds, self.remaining()))

    def lock_seconds(self) -> float:
        """For `Lock.acquire(timeout=...)`, where -1 is for ever."""
        left = self.remaining()
        return -1 if left > threading.TIMEOUT_MAX else left

    def poll_ms(self) -> int | None:
        """For `poll()`: rounded up, or it spins through the last millisecond; at most a day, as it takes an int."""
        left = self.remaining()
        return None if left == math.inf else math.ceil(min(left, 86400.0) * 1000)
