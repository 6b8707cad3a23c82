"""The event loop of environments' coroutines, which is left behind if one of them blocks it.

Episodes are played in another loop, which goes on meanwhile. The one whose coroutine blocks has failed; the
others that were in the loop are lost, and each is played again in a loop of its own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from retrain.environments.episode import (
    CallAsync,
    EpisodeError,
    EpisodeLostError,
    EpisodeTimeoutError,
    within,
)
from retrain.environments.shared_loop import SharedLoop, check_held_up
from retrain.environments.threads import LeftBehindError
from retrain.event_loop import EventLoopThread

GRACE_S = 2.0  # for a busy machine
BLOCKED = "something blocked the event loop of its coroutines"
LOOK_S, SLICE_S = 1.0, 0.1  # between looks at the loop, and at one that does not answer


@dataclass(slots=True, eq=False)
class _Call:
    """A coroutine of an environment, and where its result goes."""

    loop: EventLoopThread
    answer: asyncio.Future[Any]
    task: asyncio.Task[Any] | None = None  # that runs it

    def deliver(self, result: Future[Any]) -> None:
        if self.answer.done():
            return
        if result.cancelled():
            self.answer.cancel()
        elif error := result.exception():
            self.answer.set_exception(error)
        else:
            self.answer.set_result(result.result())


class OwnLoop:
    """The loop of a run's environments, or of one episode; used within another event loop."""

    def __init__(self, limit_s: float, *, is_alone: bool = False) -> None:
        """Prepare.

        Args:
            limit_s: how long a coroutine may run before it waits.
            is_alone: one episode uses the loop, so that whatever blocks it is that one's.
        """
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
        here = asyncio.get_running_loop()
        call = _Call(self._loop, here.create_future())
        begun = self._loop.begin(self._limited(partial(_registered, call, function), limit_s))
        begun.add_done_callback(partial(_deliver, here, call))
        self._calls.add(call)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._watch())
        try:
            return await call.answer
        finally:
            begun.cancel()  # has no effect unless the wait was cancelled
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

    async def _limited(self, function: Callable[[], Awaitable[Any]], limit_s: float | None) -> Any:
        """Return what a call gives; EpisodeLostError in place of a failure that others may have caused."""
        began_s = time.monotonic()
        try:
            found = await within(function, limit_s)
        except LeftBehindError:
            check_held_up(began_s, limit_s)
            raise
        if isinstance(found, EpisodeError):
            check_held_up(began_s, limit_s)
        return found

    async def _watch(self) -> None:
        """Leave the loop behind once a task has blocked it for too long; end with the last call."""
        while self._calls:
            beat = asyncio.wrap_future(self._loop.begin(asyncio.sleep(0)))
            blocking, since_s = self._loop.running_task(), time.monotonic()
            while not (await asyncio.wait({beat}, timeout=SLICE_S))[0]:
                if (running := self._loop.running_task()) is not blocking:  # many fill one iteration
                    blocking, since_s = running, time.monotonic()
                elif time.monotonic() - since_s > self._limit_s + GRACE_S:
                    self._leave(running)
                    break
            await asyncio.sleep(LOOK_S)

    def _leave(self, blocking: asyncio.Task[Any] | None) -> None:
        left, self._loop = self._loop, self._new_loop()
        for call in [one for one in self._calls if one.loop is left and not one.answer.done()]:
            if self.is_alone or call.task is blocking:
                why = f"a coroutine neither returned nor awaited anything for {self._limit_s:g} s"
                call.answer.set_exception(EpisodeTimeoutError(why))
            else:
                call.answer.set_exception(EpisodeLostError(BLOCKED))
        threading.Thread(target=left.close, name="left-loop", daemon=True).start()


async def _registered(call: _Call, function: Callable[[], Awaitable[Any]]) -> Any:
    call.task = asyncio.current_task()
    return await function()


def _deliver(loop: asyncio.AbstractEventLoop, call: _Call, result: Future[Any]) -> None:
    try:
        loop.call_soon_threadsafe(call.deliver, result)
    except RuntimeError:  # it is closed
        return
