"""Taking trio's locks without a turn of the event loop while they are free: trio's own `acquire` always takes one."""

from __future__ import annotations

import trio


async def acquire(place: trio.Lock | trio.Semaphore) -> None:
    """Take a lock or a place, at once if it is free."""
    try:
        place.acquire_nowait()
    except trio.WouldBlock:
        await place.acquire()


class Lock:
    """A trio.Lock for `async with`."""

    __slots__ = ("_lock", "locked")

    def __init__(self) -> None:
        self._lock = trio.Lock()
        self.locked = self._lock.locked

    async def __aenter__(self) -> None:
        await acquire(self._lock)

    async def __aexit__(self, *exc: object) -> None:
        self._lock.release()
