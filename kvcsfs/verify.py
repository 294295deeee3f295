"""`kvcsfs verify`: has the daemon read every value while it serves, and drop what is wrong."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from collections.abc import Iterator

from kvcsfs import wire
from kvcsfs.control import Control
from kvcsfs.progress import Progress

STEP_BYTES = 16 << 20
STEP_SECONDS = 3600.0  # one step may be one value of 4 GiB on a slow disk
MIB = 1 << 20


@dataclasses.dataclass
class Result:
    """What was read of one mountpoint, and what was dropped."""

    mountpoint: int
    entries: int = 0
    bytes: int = 0
    dropped: list[str] = dataclasses.field(default_factory=list)


def verify(control: Control, mountpoint: int, after: str, rate: int) -> Result:
    """Verify the keys of a mountpoint that follow `after`, at `rate` bytes a second at most (0: no limit).

    Shows a bar on a terminal. On Ctrl-C it says how to go on.
    """
    result, last = Result(mountpoint), after
    total = control.ask(wire.Usage(2, mountpoint, ""), wire.UsageReply).value_bytes
    try:
        with Progress(total // MIB) as bar:
            for reply in _steps(control, mountpoint, after, rate):
                result.entries += reply.entries
                result.bytes += reply.size_bytes
                result.dropped += reply.dropped
                last = reply.last
                bar.reach(result.bytes // MIB, f"MiB read, {len(result.dropped)} values dropped")
    except KeyboardInterrupt:
        again = f"kvcsfs verify --mountpoint {mountpoint} --after {shlex.quote(last)}"
        print(f"kvcsfs: stopped; go on with: {again}", file=sys.stderr)
        raise
    return result


def _steps(control: Control, mountpoint: int, after: str, rate: int) -> Iterator[wire.VerifyReply]:
    """Ask step by step, a second's worth at a time or less."""
    more = True
    while more:
        begun = time.monotonic()
        request = wire.Verify(2, mountpoint, after, min(rate or STEP_BYTES, STEP_BYTES))
        reply = control.ask(request, wire.VerifyReply, STEP_SECONDS)
        yield reply
        after, more = reply.last, reply.more
        if rate:
            time.sleep(max(0.0, begun + reply.size_bytes / rate - time.monotonic()))
