"""Who takes the next request: tasks that wait and read as those of pyfuse3 do, with a pipe for the kernel."""

import os
from collections.abc import Awaitable, Callable, Iterator

import pytest
import trio
import trio.testing

from kvcsfs.fuse import dispatch
from kvcsfs.fuse.dispatch import Dispatch

TASKS = 3


class Kernel:
    """Requests of a byte each, and what was answered."""

    def __init__(self) -> None:
        self.fd, self._end = os.pipe()
        self.answered = b""
        self.takes_back = b""  # the request that is gone when it is read

    def read(self) -> bytes:
        if (request := os.read(self.fd, 1)) != self.takes_back or not request:
            return request
        assert not os.get_blocking(self.fd), "everything waits for the next request"
        return os.read(self.fd, 1)

    def ask(self, requests: bytes) -> None:
        os.write(self._end, requests)

    def hang_up(self) -> None:
        os.close(self._end)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    yield kernel
    os.close(kernel.fd)


async def serve(kernel: Kernel, stands_in: Dispatch, handler: Callable[[bytes], Awaitable[None]]) -> None:
    """Serve as pyfuse3.main() does, with a fixed number of tasks."""

    async def loop() -> None:
        while True:
            try:
                async with stands_in.Lock():
                    await stands_in.lowlevel.wait_readable(kernel.fd)
            except stands_in.ClosedResourceError:
                return
            request = kernel.read()
            if not request:
                return
            await handler(request)
            kernel.answered += request

    async with stands_in.open_nursery() as nursery:
        for number in range(TASKS):
            nursery.start_soon(loop, name=f"task-{number}")


async def answer(request: bytes) -> None:
    """At once."""


async def test_an_answer_that_waits_holds_nobody_up(kernel):
    come = trio.Event()

    async def handler(request: bytes) -> None:
        if request in b"AB":
            await come.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, kernel, Dispatch(), handler)
        await trio.testing.wait_all_tasks_blocked()
        kernel.ask(b"AxBy")
        await trio.testing.wait_all_tasks_blocked()
        assert kernel.answered == b"xy"
        kernel.ask(b"z")
        await trio.testing.wait_all_tasks_blocked()
        assert kernel.answered == b"xyz"
        come.set()
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(kernel.answered) == sorted(b"xyzAB")
        kernel.ask(b"after")
        await trio.testing.wait_all_tasks_blocked()
        assert kernel.answered.endswith(b"after")
        nursery.cancel_scope.cancel()


async def test_a_request_that_is_taken_back_holds_nobody_up(kernel):
    kernel.takes_back = b"x"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, kernel, Dispatch(), answer)
        for _ in range(2 * TASKS):
            await trio.testing.wait_all_tasks_blocked()
            kernel.ask(b"x")
        await trio.testing.wait_all_tasks_blocked()
        kernel.ask(b"ab")
        await trio.testing.wait_all_tasks_blocked()
        assert kernel.answered == b"ab"
        nursery.cancel_scope.cancel()


async def test_a_session_that_closes_ends_every_task(kernel):
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, kernel, Dispatch(), answer)
            await trio.testing.wait_all_tasks_blocked()
            kernel.hang_up()
    assert kernel.answered == b""


async def test_a_flood_of_requests_lets_others_run(kernel, monkeypatch):
    clock = iter(range(10_000))  # each look at it finds a millisecond gone
    monkeypatch.setattr(dispatch.time, "monotonic", lambda: next(clock) / 1000)
    monkeypatch.setattr(dispatch, "RUN_SECONDS", 0.010)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while len(kernel.answered) < 1000:
            await trio.lowlevel.checkpoint()
            turns += 1

    kernel.ask(bytes(1000))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, kernel, Dispatch(), answer)
        await others()
        nursery.cancel_scope.cancel()
    assert 100 <= turns <= 120
