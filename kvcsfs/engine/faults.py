"""Crash points: names for the moments between two steps on disk, where a test ends the process with SIGKILL.

`KVCSFS_FAULT=point:n` in the environment kills at the n-th pass of a point. Without it `point` does nothing.
`docs/recovery.md` tells what each leaves behind.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable

from kvcsfs.errors import ConfigError

POINTS = (
    "epoch.made",  # the file of the new epoch is there, empty
    "epoch.synced",  # and durable; that of the last one is still there
    "recovery.unlinked",  # a file of no value is removed
    "recovery.read",  # every footer is read, the index still empty
    "reserve.promised",  # victims left the index, their files are as they were
    "reserve.unlinked",  # a victim's file is removed
    "reserve.dropped",  # a free slot is removed
    "slot.taken",  # a file is proven to be ours alone; its footer is the old one
    "slot.voided",  # its footer is void
    "slot.made",  # a new file is there, empty
    "slot.sized",  # and has its size
    "file.cut",  # a file written through the mount has lost what was written ahead
    "file.padded",  # and has its final size
    "commit.begun",  # a generation is taken, the data is written
    "commit.sealed",  # the footer is written, that of the replaced value is still there
    "commit.synced",  # data, footer and name are durable
    "commit.indexed",  # the index has it, the client does not know yet
    "rename.begun",
    "rename.written",  # the footer has the new key, the target's value is still there
    "replaced.voided",  # commit, rename: the replaced value is void
    "remove.begun",  # delete, evict: gone from the index, still there on disk
    "remove.voided",  # the footer is void
    "remove.unlinked",  # the file is removed
    "snapshot.begun",  # a new snapshot is there, empty
    "snapshot.written",  # it is whole, and not durable
    "snapshot.synced",  # it is durable, and not in place
    "snapshot.renamed",  # it is in place
)


def _off(_name: str) -> None:
    """Pass a point."""


def _armed(wanted: str) -> Callable[[str], None]:
    name, _, count = wanted.partition(":")
    if name not in POINTS or not count.isdecimal() or not int(count):
        raise ConfigError(
            f"KVCSFS_FAULT: {wanted!r}: expected POINT:N, a point of docs/recovery.md and a count"
        )
    passes = itertools.count(1)

    def point(passed: str) -> None:
        if passed == name and next(passes) == int(count):
            os.kill(os.getpid(), signal.SIGKILL)

    return point


point = _armed(os.environ["KVCSFS_FAULT"]) if os.environ.get("KVCSFS_FAULT") else _off
