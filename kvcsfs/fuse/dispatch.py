"""Dispatch: which task takes the kernel's next request, at half the loop's turns that pyfuse3 needs by itself.

pyfuse3 hands a lock around: after each request another of its tasks waits for the next one, which is two turns of
trio's loop a request. Here the task that answered goes on taking requests, and another takes over only when an answer
has to wait for something. pyfuse3 3.5 has no setting for that, but it looks up what it needs of trio by the name `trio`
in its own module, where its asyncio mode puts a stand-in too (pyfuse3/asyncio.py).
"""

from __future__ import annotations

import os
import select
import time
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from typing import Any

import pyfuse3
import trio
import trio.lowlevel

RUN_SECONDS = 0.0003  # for so long without a turn of the loop: sockets and timers wait meanwhile


class Dispatch:
    """What one session of pyfuse3 sees as trio, as trio.lowlevel, as its nursery and as its lock."""

    ClosedResourceError = trio.ClosedResourceError
    Lock: Callable[[], Dispatch]
    current_task = staticmethod(trio.lowlevel.current_task)
    current_trio_token = staticmethod(trio.lowlevel.current_trio_token)
    notify_closing = staticmethod(trio.lowlevel.notify_closing)

    def __init__(self) -> None:
        self.lowlevel = self
        self.Lock = lambda: self
        self._nursery: trio.Nursery | None = None
        self._poll: select.poll | None = None
        self._run_ends = 0.0
        self._taken = False
        self._waiting = trio.lowlevel.ParkingLot()
        self._idle = False

    def install(self) -> None:
        """For the session that begins next."""
        pyfuse3.trio = self  # type: ignore[attr-defined]  # not in its stubs

    @asynccontextmanager
    async def open_nursery(self) -> AsyncIterator[Dispatch]:
        async with trio.open_nursery() as self._nursery:
            yield self

    def start_soon(self, loop: Callable[..., Coroutine[Any, Any, None]], *args: Any, name: str) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(self._serve, loop, args, name=name)

    async def _serve(self, loop: Callable[..., Coroutine[Any, Any, None]], args: tuple[Any, ...]) -> None:
        try:
            while not await self._steps(loop(*args)):
                pass
        finally:
            self._waiting.unpark()

    @types.coroutine
    def _steps(self, loop: Coroutine[Any, Any, None]) -> Generator[Any, Any, bool]:
        """One of pyfuse3's tasks, step by step: another takes over whenever it waits for anything but a request.

        False if it has to begin anew: there was nothing to read after all. No handler raises a BlockingIOError
        (posix.posix_errors). pyfuse3 doesn't free its buffer then, a page or two that were written to.
        """
        outcome = None
        while True:
            try:
                waits_for = loop.send(outcome)
            except StopIteration:
                return True
            except BlockingIOError:
                return False
            if not self._idle:
                self._waiting.unpark()
            self._idle = False
            outcome = yield waits_for

    async def __aenter__(self) -> None:
        while self._taken:
            self._idle = True
            await self._waiting.park()
        self._taken = True

    async def __aexit__(self, *exc: object) -> None:
        self._taken = False

    async def wait_readable(self, fd: int) -> None:
        """Return when there is a request: without a turn of the loop if there is one by now, but not for long.

        It may be gone again when it is read: the kernel takes back what a program asked that is killed meanwhile.
        Reading mustn't wait then, for the whole process would wait with it until somebody uses the mount.
        """
        if self._poll is None:
            os.set_blocking(fd, False)
            self._poll = select.poll()
            self._poll.register(fd, select.POLLIN)
        if time.monotonic() < self._run_ends and self._poll.poll(0):
            return
        self._idle = True
        await trio.lowlevel.wait_readable(fd)
        self._run_ends = time.monotonic() + RUN_SECONDS
