"""The exception tree: four kinds of failure, each with one code and one errno.

The caller's (`InvalidKeyError`, `KeyTooLongError`, ...), the store's (`CapacityError`, `BusyError`, ...), the world's
(`BackingError`, `KvcsUnavailableError`, ...) and a bug (`KvcsError` itself). A miss is a result, not an error.
"""

from __future__ import annotations

import enum
import errno


class KvcsCode(enum.IntEnum):
    """Codes of the SDK contract; numbers are stable, new ones are only added."""

    OK = 0
    NOT_FOUND = 1
    INCOMPLETE = 2
    UNAVAILABLE = 3
    RESOURCE_EXHAUSTED = 4
    INVALID_ARGUMENT = 5
    NAMESPACE_NOT_FOUND = 6
    BUFFER_TOO_SMALL = 7
    ALREADY_EXISTS = 8
    INVALID_MOUNT_POINT = 9


class KvcsError(Exception):
    """Any failure of kvcsfs; raised as itself it is a bug of ours, and nothing is known of what was done.

    `op` is the call that failed, "" where there is none.
    """

    code: KvcsCode = KvcsCode.UNAVAILABLE
    errno: int = errno.EIO

    def __init__(self, message: str, op: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.op = op

    def __str__(self) -> str:
        return f"{self.op}: {self.message}" if self.op else self.message


class ConfigError(KvcsError):
    """A configuration value that can't be used. Nothing was started; the message names file, key and what fits."""

    code, errno = KvcsCode.INVALID_ARGUMENT, errno.EINVAL

    def __init__(self, message: str, op: str = "") -> None:
        # Paths and keys of the file may hold anything; the message stays one line.
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in message), op)


class InvalidKeyError(KvcsError):
    """A key that is empty, has a NUL, isn't UTF-8, or is a temporary name. Nothing was done; use another key."""

    code, errno = KvcsCode.INVALID_ARGUMENT, errno.EINVAL


class KeyTooLongError(KvcsError):
    """A key over the limit, in bytes of UTF-8. Nothing was done; use a shorter key."""

    code, errno = KvcsCode.INVALID_ARGUMENT, errno.ENAMETOOLONG


class InvalidValueError(KvcsError):
    """A value of size 0, or an object whose writer left another size than it reserved. Nothing is stored."""

    code, errno = KvcsCode.INVALID_ARGUMENT, errno.EINVAL


class AccessError(KvcsError):
    """The access rules don't let this peer read, or write, the key. Nothing was done."""

    code, errno = KvcsCode.INVALID_ARGUMENT, errno.EACCES


class NotFoundError(KvcsError):
    """The key holds nothing, where the caller needed it to."""

    code, errno = KvcsCode.NOT_FOUND, errno.ENOENT


class ExistsError(KvcsError):
    """The key holds a value already, and the caller asked to keep it. Nothing was changed."""

    code, errno = KvcsCode.ALREADY_EXISTS, errno.EEXIST


class CapacityError(KvcsError):
    """A put needs more bytes than eviction can free.

    Nothing was stored and nothing stays reserved. The caller may drop the value, since this is a cache, or try
    again once readers release their pins.
    """

    code, errno = KvcsCode.RESOURCE_EXHAUSTED, errno.ENOSPC


class BusyError(KvcsError):
    """The store can't take this now: it is still recovering, or the new object is still open for writing elsewhere.

    The key is as it was. Trying again is safe.
    """

    code, errno = KvcsCode.UNAVAILABLE, errno.EBUSY


class MountpointError(KvcsError):
    """A mountpoint index that isn't configured. Nothing was done."""

    code, errno = KvcsCode.INVALID_MOUNT_POINT, errno.ENODEV


class ReservationError(KvcsError):
    """A reservation that is unknown, expired or another connection's. The key is as it was."""

    code, errno = KvcsCode.INVALID_ARGUMENT, errno.ESTALE


class BackingError(KvcsError):
    """The backing file system failed; the errno is EIO whatever it said. The key is as it was, or absent."""

    code, errno = KvcsCode.UNAVAILABLE, errno.EIO


class ProtocolError(KvcsError):
    """A frame that breaks the protocol. The connection it came on is closed; others are not touched."""

    code, errno = KvcsCode.INVALID_ARGUMENT, errno.EPROTO


class KvcsTimeoutError(KvcsError, TimeoutError):
    """The deadline passed and no key of the batch was done."""

    code, errno = KvcsCode.UNAVAILABLE, errno.ETIMEDOUT


class KvcsUnavailableError(KvcsError, ConnectionError):
    """No daemon answers at the socket, or it died during the call. The next call connects anew."""

    code, errno = KvcsCode.UNAVAILABLE, errno.ENOTCONN


class KvcsClosedError(KvcsError):
    """The client was closed, or is used in a forked child. Make a new client there."""

    code, errno = KvcsCode.UNAVAILABLE, errno.EBADF
