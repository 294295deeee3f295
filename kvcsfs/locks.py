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
    """A trio.Lock for `async with`, made when it is first taken: a listing makes nodes of files, and opens none."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock: trio.Lock | None = None

    def locked(self) -> bool:
        """Whether somebody has it."""
        return self._lock is not None and self._lock.locked()

    async def __aenter__(self) -> None:
        if self._lock is None:
            self._lock = trio.Lock()
        await acquire(self._lock)

    async def __aexit__(self, *exc: object) -> None:
        assert self._lock is not None
        self._lock.release()
