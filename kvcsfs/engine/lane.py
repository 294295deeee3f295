"""Lane: the way to the files of one mountpoint, whatever its file system does.

File work runs in threads that belong to the mountpoint, so that one that hangs takes none from the others. A step is
a task of the lane: whoever asked for it may leave when the file system hangs, and the step books what comes of it, if
it ever ends. A breaker tells a file system that hangs from one that is slow: work that is out for long makes the lane
ask for a small thing, and if that isn't answered either, nothing new is begun until it is.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, TypeVarTuple

import trio

from kvcsfs.engine.store import SlotStore
from kvcsfs.errors import BackingError, KvcsError

log = logging.getLogger(__name__)

THREADS = 16
BRIEF_ITEMS = 16  # done on the loop in one go
BRIEF_SECONDS = 0.02  # longer for so many, and the file system doesn't answer at once
SLOW_FACTOR = (
    50  # then threads do it for so many times as long: the loop stands still for 2 % of the time at most
)
PROBES = 4
LATE_SECONDS = 5.0  # work that is out for longer makes us ask whether the file system answers
PROBE_SECONDS = 5.0  # and this long it may take to: a busy disk is not a hanging one
LOOK_SECONDS = 0.5

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclasses.dataclass(slots=True, eq=False)
class _Outcome:
    """What a step came to; `left` when nobody waits for it any more."""

    ready: trio.Event
    value: Any = None
    error: BaseException | None = None
    left: bool = False


class Lane:
    """Threads, steps and breaker of one mountpoint. `serve` must be running while steps are made."""

    def __init__(self, store: SlotStore) -> None:
        self._store = store
        self._name = str(store.directory.path)
        self._slow_until = 0.0
        self.hung = False
        self.hangs = 0
        self._limiter = trio.CapacityLimiter(THREADS)
        self._probe_limiter = trio.CapacityLimiter(PROBES)
        self._out: dict[trio.CancelScope, float] = {}  # work under way, the oldest first, and when it began
        self._waiting: set[_Outcome] = set()
        self._steps = 0
        self._asked: float | None = None  # when the oldest probe without an answer was sent
        self._probed = 0.0
        self._nursery: trio.Nursery | None = None
        self._by_path: set[trio.CancelScope] = set()
        self._ending_since = math.inf
        self._stopping = False
        self._look = trio.Event()

    # -- work

    async def run(self, job: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run file work in a thread, to its end, whoever is cancelled: a step must know what came of it."""
        return await self._run(job, args, trio.CancelScope(shield=True))

    async def run_by_path(self, job: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run file work on the directory's path: what it leads to by now may hang although the store answers."""
        scope = trio.CancelScope(shield=True)
        self._by_path.add(scope)
        try:
            return await self._run(job, args, scope)
        finally:
            self._by_path.remove(scope)

    async def _run(self, job: Callable[..., T], args: tuple[Any, ...], scope: trio.CancelScope) -> T:
        with scope:
            self._out[scope] = time.monotonic()
            try:
                return await trio.to_thread.run_sync(
                    job, *args, limiter=self._limiter, abandon_on_cancel=True
                )
            finally:
                del self._out[scope]
        await trio.lowlevel.checkpoint_if_cancelled()
        raise BackingError("given up at the stop: the backing file system doesn't answer")

    async def brief(self, job: Callable[..., list[T]], *columns: Sequence[Any]) -> list[T]:
        """Run a job of microseconds an item: `job(store, *columns)` gives a result for each position.

        On the loop while a local file system answers at once: each system call in a thread is a fight for the
        interpreter lock, which doubles the price of a small put. A slice that took long sends the rest, and all for a
        while, to a thread.
        """
        results: list[T] = []
        for start in range(0, len(columns[0]), BRIEF_ITEMS):
            if not self._is_prompt():
                return results + await self.run(job, self._store, *[column[start:] for column in columns])
            begin = time.monotonic()
            results += job(self._store, *[column[start : start + BRIEF_ITEMS] for column in columns])
            end = time.monotonic()
            if end - begin > BRIEF_SECONDS:
                self._slow_until = end + SLOW_FACTOR * (end - begin)
        return results

    def _is_prompt(self) -> bool:
        """Whether a file call may be made on the event loop: on a local file system that answers at once."""
        return self._store.is_local and time.monotonic() >= self._slow_until and not self._out_is_late()

    # -- steps

    async def step(
        self,
        function: Callable[[*Ts], Awaitable[T]],
        *args: *Ts,
        undo: Callable[[T], Awaitable[None]] | None = None,
    ) -> T:
        """Run a step to its end, and wait for it: shielded, since what has begun completes.

        Raises BackingError when the file system hangs; then the step goes on alone, and `undo` gets what it returns.
        On a prompt file system the caller carries it out: a task costs more than most steps.
        """
        self.check()
        if self._is_prompt():
            return await self._carry_out_here(function, *args)
        outcome = await self._wait_for(function, args, undo)
        if outcome.left:
            raise self._no_answer()
        value: T = outcome.value
        return value

    async def finish(self, function: Callable[[*Ts], Awaitable[None]], *args: *Ts) -> None:
        """Run a step that gives something back, whether the file system hangs or not; then it isn't waited for."""
        if self._is_prompt():
            await self._carry_out_here(function, *args)
        else:
            await self._wait_for(function, args, None)

    @property
    def busy(self) -> bool:
        """Whether a step or other file work is under way, a thread that nobody waits for included."""
        threads = self._limiter.borrowed_tokens + self._probe_limiter.borrowed_tokens
        return bool(self._steps or self._out or threads)

    async def _carry_out_here(self, function: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        self._steps += 1
        try:
            return await function(*args)
        finally:
            self._step_ended()

    def _step_ended(self) -> None:
        self._steps -= 1
        if self._stopping:
            self._look.set()

    async def _wait_for(self, function: Callable[..., Awaitable[Any]], args: Any, undo: Any) -> _Outcome:
        assert self._nursery is not None
        outcome = _Outcome(trio.Event(), left=self.hung)
        self._steps += 1
        self._nursery.start_soon(self._carry_out, outcome, function, args, undo)
        if outcome.left:
            return outcome
        self._waiting.add(outcome)
        try:
            with trio.CancelScope(shield=True):
                await outcome.ready.wait()
        finally:
            self._waiting.discard(outcome)
        if outcome.error is not None and not outcome.left:
            raise outcome.error
        return outcome

    async def _carry_out(
        self, outcome: _Outcome, function: Callable[..., Awaitable[Any]], args: Any, undo: Any
    ) -> None:
        try:
            outcome.value = await function(*args)
            if outcome.left and undo is not None:
                await undo(outcome.value)
        except trio.Cancelled:
            outcome.error = self._no_answer()
            raise
        except Exception as exc:
            outcome.error = exc
            if outcome.left and not isinstance(exc, KvcsError | OSError):
                log.exception("%s: a step failed that nobody waited for", self._name)
        finally:
            outcome.ready.set()
            self._step_ended()

    # -- the breaker

    @property
    def stuck(self) -> bool:
        """Whether nothing can be begun: it hangs, or all threads are taken by work that is late."""
        return self.hung or (not self._limiter.available_tokens and self._out_is_late())

    def check(self) -> None:
        """Raise BackingError when nothing can be begun."""
        if self.stuck:
            raise self._no_answer()

    def _no_answer(self) -> BackingError:
        return BackingError(f"{self._name}: the backing file system doesn't answer")

    def _out_is_late(self) -> bool:
        begun = next(iter(self._out.values()), None)
        return begun is not None and time.monotonic() - begun > LATE_SECONDS

    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry steps out and watch over them; ends after `stop`, when they have ended or are given up."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                while self._steps or self._out or not self._stopping:
                    with trio.move_on_after(LOOK_SECONDS):
                        await self._look.wait()
                    self._look = trio.Event()
                    self._watch(nursery)
                    ending = time.monotonic() - self._ending_since
                    if ending >= 0 and self.hung:
                        for scope in list(self._out):
                            scope.cancel()
                    elif ending > LATE_SECONDS:
                        for scope in self._by_path:
                            scope.cancel()
                nursery.cancel_scope.cancel()

    def end(self) -> None:
        """The engine stops: from now on work that hangs is given up, what waits for it too."""
        self._ending_since = time.monotonic()

    def stop(self) -> None:
        """Let `serve` end."""
        self._stopping = True
        self._look.set()

    def _watch(self, nursery: trio.Nursery) -> None:
        """Ask whether the file system answers, if work is late or it hangs; open the breaker if it didn't answer."""
        now = time.monotonic()
        asking = self._asked is not None
        free = self._probe_limiter.available_tokens
        if free and (self.hung or self._out_is_late()) and (not asking or now - self._probed > PROBE_SECONDS):
            self._asked = self._asked if asking else now
            self._probed = now
            nursery.start_soon(self._ask)
        if self._asked is not None and now - self._asked > PROBE_SECONDS and not self.hung:
            self.hung = True
            self.hangs += 1
            log.warning("%s: the backing file system doesn't answer; requests fail until it does", self._name)
            for outcome in self._waiting:
                outcome.left = True
                outcome.ready.set()

    async def _ask(self) -> None:
        await trio.to_thread.run_sync(self._store.probe, limiter=self._probe_limiter, abandon_on_cancel=True)
        self._asked = None
        if self.hung:
            self.hung = False
            log.info("%s: the backing file system answers again", self._name)
