"""Calls of environments' functions: of plain ones in threads, of coroutines in an event loop.

Plain functions of all episodes are called in turn, in the order in which they are asked for, or those of one
episode in a thread of its own. In turn, slow ones do not hold up the others: a call that takes longer than
`SLOW_S` keeps its thread, and those after it get another one.

The loop of coroutines is left behind if one of them blocks it, and episodes are played in another. The one
whose coroutine blocks has failed; the others that were in the loop are lost, and each is played again in a
loop of its own. So is one whose time limit was noticed late: a coroutine of another one ran meanwhile.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from retrain.base.event_loop import EventLoopThread, LeftBehindError, end_runaway
from retrain.plugins.environments.episode import (
    CallAsync,
    EpisodeError,
    EpisodeLostError,
    EpisodeTimeoutError,
    is_ours,
    within,
)

GRACE_S = 2.0  # for a busy machine
BLOCKED = "something blocked the event loop of its coroutines"
POLL_S, SLICE_S = 1.0, 0.1  # between two checks of the loop, and at one that does not answer
LATE_S = 0.5  # that a time limit may pass unnoticed before a coroutine must have held up the event loop
HELD_UP = "a coroutine of another episode held up the event loop"

SLOW_S = 0.05
SLOW_ONCE_S = 0.001  # the same after a slow call, because the next ones probably are

Calls: TypeAlias = "queue.SimpleQueue[_PlainCall | None]"


class InTurn:
    """The functions of all episodes of a run, or of one; used within one event loop."""

    def __init__(self, limit_s: float, *, is_own: bool = False) -> None:
        """Prepare.

        Args:
            limit_s: the time that a call may take.
            is_own: the thread is that of one episode, which what it opens may belong to: only a call that
                takes too long keeps it from those that follow.
        """
        self._limit_s = limit_s
        slow = (limit_s, limit_s) if is_own else (SLOW_S, SLOW_ONCE_S)
        self._usually_slow_s, self._slow_once_s = (min(one, limit_s) for one in slow)
        self._slow_s = self._usually_slow_s
        self._calls: Calls = queue.SimpleQueue()
        self._worker: _Worker | None = None
        self._timer: asyncio.TimerHandle | None = None  # of the next look at the worker

    async def call(self, function: Callable[[], Any], unwanted: Callable[[Any], object]) -> Any:
        """Return what a function returns, which raises nothing; LeftBehindError if it takes too long."""
        call = _PlainCall(function, unwanted, asyncio.get_running_loop().create_future())
        self._calls.put(call)
        if self._worker is None:
            self._worker = _Worker(self._calls)
        if self._timer is None:
            self._look_in(self._slow_s)
        return await call.answer

    def close(self) -> None:
        """End the thread after its calls; a further call begins another one."""
        if self._worker is not None:
            self._calls.put(None)
            self._calls, self._worker = queue.SimpleQueue(), None

    def _look_in(self, wait_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._check_progress)

    def _check_progress(self) -> None:
        """Leave the thread alone with a call that is slow; the calls after it go to another."""
        self._timer, worker = None, self._worker
        if worker is None:
            return
        with worker.lock:
            call, took_s = worker.call, time.monotonic() - worker.began_s
            worker.is_left = call is not None and took_s >= self._slow_s
        if call is None and self._calls.empty():
            self._slow_s = self._usually_slow_s
            return
        if call is None or not worker.is_left:
            self._look_in(max(self._slow_s - took_s, SLOW_ONCE_S))
            return

        def give_up() -> None:
            if not call.answer.done():
                call.answer.set_exception(LeftBehindError())
                end_runaway(worker.thread, "a function of the environment")

        asyncio.get_running_loop().call_later(self._limit_s - took_s, give_up)
        self._slow_s, self._worker = self._slow_once_s, None
        if not self._calls.empty():
            self._worker = _Worker(self._calls)
            self._look_in(self._slow_s)


@dataclass(frozen=True, slots=True, eq=False)
class _PlainCall:
    function: Callable[[], Any]  # raises nothing
    unwanted: Callable[[Any], object]  # takes a result that nobody waits for
    answer: asyncio.Future[Any]

    def deliver(self, result: Any) -> None:
        if self.answer.done():
            self.unwanted(result)
        else:
            self.answer.set_result(result)


class _Worker:
    """A thread that makes one call after another, until it is left with a slow one."""

    def __init__(self, calls: Calls) -> None:
        self.lock = threading.Lock()  # guards the others
        self.call: _PlainCall | None = None  # that runs
        self.began_s = 0.0
        self.is_left = False
        self.thread = threading.Thread(target=self._work, args=(calls,), name="environment", daemon=True)
        self.thread.start()

    def _work(self, calls: Calls) -> None:
        while not self.is_left and (call := calls.get()) is not None:
            with self.lock:
                self.call, self.began_s = call, time.monotonic()
            result = call.function()
            with self.lock:
                self.call = None
            try:
                call.answer.get_loop().call_soon_threadsafe(call.deliver, result)
            except RuntimeError:  # it is closed
                call.unwanted(result)
                return


class CoroutineLoop:
    """The loop of a run's environments, or of one episode; used within another event loop."""

    def __init__(self, limit_s: float, *, is_alone: bool = False) -> None:
        """Prepare; a coroutine may run for `limit_s` at a time. `is_alone`: one episode uses the loop."""
        self._limit_s, self.is_alone = limit_s, is_alone
        self._loop = self._new_loop()
        self._calls: set[_Call] = set()
        self._watching: asyncio.Task[None] | None = None

    async def call(self, function: Callable[[], Awaitable[Any]], limit_s: float | None) -> Any:
        """Return what an awaitable gives, within a time limit, if there is one.

        Raises:
            LeftBehindError: it took too long.
            EpisodeTimeoutError: it blocked the loop.
            EpisodeLostError: something did, perhaps of another episode.
        """
        call = _Call(self._loop)

        async def registered() -> Any:
            call.task = asyncio.current_task()
            return await function()

        async def limited() -> Any:
            """Return what the call gives; EpisodeLostError if others may have made it late."""
            began_s = time.monotonic()
            try:
                return await within(registered, limit_s)
            except LeftBehindError:
                check_held_up(began_s, limit_s)
                raise

        begun = self._loop.begin(limited())
        call.answer = asyncio.wrap_future(begun)  # cancels it, if the wait is cancelled
        self._calls.add(call)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._watch())
        try:
            return await call.answer
        except asyncio.CancelledError as error:
            if call.failure is None or is_ours(error):
                raise
            raise call.failure from None
        finally:
            self._calls.discard(call)

    def of_episode(self) -> CallAsync:
        """Return `call` for one episode, which is lost with the loop of its first call."""
        used: EventLoopThread | None = None

        async def call(function: Callable[[], Awaitable[Any]], limit_s: float | None) -> Any:
            nonlocal used
            before, used = used, self._loop
            if before is not None and before is not used:
                raise EpisodeLostError(BLOCKED)
            try:
                return await self.call(function, limit_s)
            except Exception:
                used = self._loop  # in which the episode can be closed
                raise

        return call

    def close(self) -> None:
        """Cancel what still runs."""
        self._loop.close()

    def _new_loop(self) -> EventLoopThread:
        return EventLoopThread() if self.is_alone else EventLoopThread(SharedLoop)

    async def _watch(self) -> None:
        """Leave the loop behind once a task has blocked it for too long; end with the last call."""
        while self._calls:
            is_blocked = False
            beat = asyncio.wrap_future(self._loop.begin(asyncio.sleep(0)))
            blocking, since_s = self._loop.running_task(), time.monotonic()
            while not is_blocked and not (await asyncio.wait({beat}, timeout=SLICE_S))[0]:
                if (running := self._loop.running_task()) is not blocking:  # many fill one iteration
                    blocking, since_s = running, time.monotonic()
                is_blocked = time.monotonic() - since_s > self._limit_s + GRACE_S
            if is_blocked:
                left, self._loop = self._loop, self._new_loop()
                for call in [call for call in self._calls if call.loop is left and not call.answer.done()]:
                    call.failure = EpisodeLostError(BLOCKED)
                    if self.is_alone or call.task is blocking:
                        why = f"a coroutine neither returned nor awaited anything for {self._limit_s:g} s"
                        call.failure = EpisodeTimeoutError(why)
                    call.answer.cancel()
                left.give_up("a coroutine")
                threading.Thread(target=left.close, name="left-loop", daemon=True).start()
            await asyncio.sleep(POLL_S)


@dataclass(slots=True, eq=False)
class _Call:
    """A coroutine of an environment, and where its result goes."""

    loop: EventLoopThread
    answer: asyncio.Future[Any] = field(init=False)
    task: asyncio.Task[Any] | None = None  # that runs it
    failure: EpisodeError | None = None  # why the answer was cancelled with its loop


class SharedLoop(asyncio.SelectorEventLoop):
    """The loop of several episodes."""


def check_held_up(since_s: float, limit_s: float | None) -> None:
    """Raise EpisodeLostError if a limit was noticed so late that another episode held up this loop.

    Args:
        since_s: a reading of `time.monotonic`.
        limit_s: the time that the episode had since then; without one, nothing was too late.
    """
    is_shared = isinstance(asyncio.get_running_loop(), SharedLoop)
    if is_shared and limit_s is not None and time.monotonic() - since_s > limit_s + LATE_S:
        raise EpisodeLostError(HELD_UP)
