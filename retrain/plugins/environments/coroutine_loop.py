"""The event loop of environments' coroutines, which is left behind if one of them blocks it.

Episodes are played in another loop, which goes on meanwhile. The one whose coroutine blocks has failed; the
others that were in the loop are lost, and each is played again in a loop of its own.

The loop of several episodes knows how long it was busy: a time limit that passes in it tells little of an
episode if coroutines of others ran meanwhile.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from retrain.base.event_loop import EventLoopThread, LeftBehindError
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
MOMENT_S = 0.05  # between moments at which busy time is written down
KEPT = 20_000  # of these moments: some 17 minutes
HELD_UP_S, HELD_UP_FRACTION = 0.1, 0.02  # of a limit: so much decides nothing
HELD_UP = "coroutines of other episodes held up the event loop"


@dataclass(slots=True, eq=False)
class _Call:
    """A coroutine of an environment, and where its result goes."""

    loop: EventLoopThread
    answer: asyncio.Future[Any] = field(init=False)
    task: asyncio.Task[Any] | None = None  # that runs it
    failure: EpisodeError | None = None  # why the answer was cancelled with its loop


class CoroutineLoop:
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
        call = _Call(self._loop)

        async def registered() -> Any:
            call.task = asyncio.current_task()
            return await function()

        async def limited() -> Any:
            """Return what the call gives; EpisodeLostError for a failure that others may have caused."""
            began_s = time.monotonic()
            try:
                result = await within(registered, limit_s)
            except LeftBehindError:
                check_held_up(began_s, limit_s)
                raise
            if isinstance(result, EpisodeError):
                check_held_up(began_s, limit_s)
            return result

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
            beat = asyncio.wrap_future(self._loop.begin(asyncio.sleep(0)))
            blocking, since_s = self._loop.running_task(), time.monotonic()
            while not (await asyncio.wait({beat}, timeout=SLICE_S))[0]:
                if (running := self._loop.running_task()) is not blocking:  # many fill one iteration
                    blocking, since_s = running, time.monotonic()
                elif time.monotonic() - since_s > self._limit_s + GRACE_S:
                    self._leave(running)
                    break
            await asyncio.sleep(POLL_S)

    def _leave(self, blocking: asyncio.Task[Any] | None) -> None:
        left, self._loop = self._loop, self._new_loop()
        for call in [call for call in self._calls if call.loop is left and not call.answer.done()]:
            if self.is_alone or call.task is blocking:
                why = f"a coroutine neither returned nor awaited anything for {self._limit_s:g} s"
                call.failure = EpisodeTimeoutError(why)
            else:
                call.failure = EpisodeLostError(BLOCKED)
            call.answer.cancel()
        left.give_up("a coroutine")
        threading.Thread(target=left.close, name="left-loop", daemon=True).start()


class _Selector(selectors.DefaultSelector):
    """Waits for the events of a loop, and measures for how long."""

    def __init__(self) -> None:
        super().__init__()
        self._waited_s = 0.0
        self._moments = deque([(time.monotonic(), 0.0)], maxlen=KEPT)  # with the time waited until then

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        began_s = time.monotonic()
        events = super().select(timeout)
        now_s = time.monotonic()
        # what is longer than asked for was no wait for events: others had the processor
        self._waited_s += now_s - began_s if timeout is None else min(now_s - began_s, max(timeout, 0.0))
        if now_s - self._moments[-1][0] > MOMENT_S:
            self._moments.append((now_s, self._waited_s))
        return events

    def busy_s(self, since_s: float) -> float:
        """Return for how long the loop, which must be running this, did not wait for events."""
        then_s, waited_s = next(
            (one for one in reversed(self._moments) if one[0] <= since_s), self._moments[0]
        )
        return max(0.0, time.monotonic() - then_s - (self._waited_s - waited_s))


class SharedLoop(asyncio.SelectorEventLoop):
    """The loop of several episodes; nothing differs but what it measures."""

    def __init__(self) -> None:
        self.selector = _Selector()
        super().__init__(self.selector)


def check_held_up(since_s: float, limit_s: float | None) -> None:
    """Raise EpisodeLostError if this loop's other episodes may have held up one, for what its limit tells.

    Args:
        since_s: a reading of `time.monotonic`.
        limit_s: the time that the episode had since then; without one, nothing was too late.
    """
    loop = asyncio.get_running_loop()
    if limit_s is None or not isinstance(loop, SharedLoop):
        return
    if loop.selector.busy_s(since_s) > max(HELD_UP_S, HELD_UP_FRACTION * limit_s):
        raise EpisodeLostError(HELD_UP)
