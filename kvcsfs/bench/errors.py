"""The one failure that is a benchmark's own."""

from __future__ import annotations

import errno

from kvcsfs.errors import KvcsCode, KvcsError


class BenchError(KvcsError):
    """The benchmark can't go on, for the reason that the message gives. What it stored is deleted."""

    code, errno = KvcsCode.UNAVAILABLE, errno.EIO
