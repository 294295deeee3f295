"""How long after its deadline a call returns."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable

from kvcsfs.errors import KvcsTimeoutError

PROMISED_SECONDS = 0.05  # docs/sdk.md: a call returns within its deadline plus this
CALLS = 9


def typical_overshoot(call: Callable[[float], object], seconds: float = 0.1) -> float:
    """The median of several calls, each given its deadline: other tests on the machine delay some, but not most."""
    late = []
    for _ in range(CALLS):
        begin = time.monotonic()
        with contextlib.suppress(KvcsTimeoutError):
            call(seconds)
        late.append(time.monotonic() - begin - seconds)
    assert min(late) > -0.01, "it gave up before its deadline"
    return statistics.median(late)
