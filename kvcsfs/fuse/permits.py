"""The access rules on the mount: what the socket asks of a peer, asked of a process that opens or changes files.

They come on top of owners and modes, which the kernel checks. Names, sizes and times are visible to whoever the modes
let look.
"""

from __future__ import annotations

import errno

from pyfuse3 import FUSEError, RequestContext

from kvcsfs.engine.access import Access


class Permits:
    """Asks the engine's rules for the process behind a request."""

    def __init__(self, access: Access) -> None:
        self._access = access

    @property
    def restricted(self) -> bool:
        """Whether there are rules at all."""
        return self._access.restricted

    def need(self, ctx: RequestContext, index: int, key: str, *, write: bool) -> None:
        """Raise EACCES unless the process may do it with a key, or with a directory that ends with "/"."""
        if not self._access.restricted:
            return
        if not self._access.may(ctx.uid, groups_of(ctx.pid) | {ctx.gid}, index, key, write):
            raise FUSEError(errno.EACCES)


def groups_of(pid: int) -> set[int]:
    """The supplementary groups of a process; none for one that is gone or can't be seen. Source: proc_pid_status(5)."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("Groups:"):
                    return {int(word) for word in line.split()[1:]}
    except OSError:
        pass
    return set()
