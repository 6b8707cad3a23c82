"""Where episodes ask for turns, and the thread that samples answers; how far they are."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeAlias

from retrain.backends import EpisodeProgress
from retrain.backends.rows import Taken
from retrain.base.errors import FullContextError, InterruptedRunError, PromptError
from retrain.base.rollouts import FirstTurn, NextTurn, Prompt, Rollout
from retrain.plugins.environments.episode import CallAsync, CallPlain, EpisodeError

Asked: TypeAlias = Prompt | FirstTurn | NextTurn
Ask: TypeAlias = Callable[[Asked], Awaitable[Rollout | None]]
POLL_S = 1.0  # between two checks of whether the run is to stop


@dataclass(slots=True, eq=False)
class Request:
    """What an episode asks for, and where its answer goes."""

    asked: Asked
    place: tuple[int, int]  # the episode's number, and which of its turns
    answer: asyncio.Future[Taken]


class TurnQueue:
    """The requests of the episodes that are played together."""

    def __init__(self, is_leaving: Callable[[], bool], *, is_free: bool = False) -> None:
        """Open; no further turn is sampled once the run is to stop.

        Args:
            is_free: environments answer at times of their own, so that which turns are sampled together is
                by chance anyway.
        """
        self._is_leaving = is_leaving
        self.is_free = is_free
        self.is_closed = False  # and all that was passed on is taken
        self._asked: list[Request] = []
        self._held = 0  # calls that requests wait for
        self._is_due = False  # whether the loop will pass requests on
        self._is_report_due = False  # that no plain function runs
        self._loop: asyncio.AbstractEventLoop | None = None
        # requests, and whether this is the report; None: closed
        self._passed: queue.SimpleQueue[tuple[list[Request], bool] | None] = queue.SimpleQueue()

    def of_episode(self, number: int) -> Ask:
        """Return what an episode asks for its turns with."""
        return partial(self._ask, ((number, turn) for turn in count()))

    async def _ask(self, places: Iterator[tuple[int, int]], asked: Asked) -> Rollout | None:
        """Wait for a turn; all that are asked for before the loop looks for events are passed on together.

        Returns:
            None: the conversation leaves no room for a turn.

        Raises:
            EpisodeError: the model cannot read the messages, or the newest ones alone fill its context.
        """
        taken = await self._taken(places, asked)
        newest = asked.told if isinstance(asked, FirstTurn) else None
        if isinstance(taken, FullContextError) and newest is not None:
            alone = await self._taken(places, FirstTurn(newest, 1))
            taken = alone if isinstance(alone, FullContextError) else None
        if isinstance(taken, PromptError):
            raise EpisodeError(str(taken))
        return taken

    async def _taken(self, places: Iterator[tuple[int, int]], asked: Asked) -> Taken:
        self._loop = asyncio.get_running_loop()
        request = Request(asked, next(places), self._loop.create_future())
        self._asked.append(request)
        self._pass_on_soon()
        return await request.answer

    async def held(
        self, call: CallPlain, function: Callable[[], Any], unwanted: Callable[[Any], object]
    ) -> Any:
        """Make a call, and pass on nothing meanwhile: which turns are sampled together is not by chance."""
        self._held += 1
        try:
            return await call(function, unwanted)
        finally:
            self._held -= 1
            self._pass_on_soon()

    async def free(
        self, call: CallAsync, function: Callable[[], Awaitable[Any]], limit_s: float | None
    ) -> Any:
        """Make a call that ends at a time of its own."""
        self.is_free = True
        return await call(function, limit_s)

    def next_batch(self) -> list[Request]:
        """Wait for requests and return all there are; none once the queue is closed."""
        requests: list[Request] = []
        while not (requests or self.is_closed):
            requests += self._receive()[0]
        return [*requests, *self.come()]

    def come(self) -> list[Request]:
        """Return the requests there are."""
        requests: list[Request] = []
        while not (self.is_closed or self._passed.empty()):
            requests += self._receive()[0]
        return requests

    def settled(self) -> list[Request]:
        """Return the requests there are once plain functions have answered all turns."""
        assert self._loop is not None

        def report() -> None:
            self._is_report_due = True
            self._pass_on()

        def report_soon() -> None:
            # one that is due may come before those who are answered take their turn
            asyncio.get_running_loop().call_soon(report)

        self._loop.call_soon_threadsafe(report_soon)
        requests, is_report = [], False
        while not (is_report or self.is_closed):
            more, is_report = self._receive()
            requests += more
        return requests

    def answer(self, requests: Sequence[Request], rollouts: Sequence[Taken]) -> None:
        """Pass on rollouts to those who asked, all at once, so that they take their turns together."""
        requests[0].answer.get_loop().call_soon_threadsafe(_deliver, requests, rollouts)

    def close(self) -> None:
        self._passed.put(None)

    def check_stop(self) -> None:
        """Raise InterruptedRunError if the run is to stop."""
        if self._is_leaving():
            raise InterruptedRunError("a stop was requested while episodes were played")

    def _receive(self) -> tuple[list[Request], bool]:
        while True:
            self.check_stop()
            with suppress(queue.Empty):
                if (passed := self._passed.get(timeout=POLL_S)) is not None:
                    return passed
                self.is_closed = True
                return [], False

    def _pass_on_soon(self) -> None:
        if not (self._is_due or self._held):
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._pass_on)

    def _pass_on(self) -> None:
        self._is_due = False
        if not self._held and (self._asked or self._is_report_due):
            self._passed.put((self._asked, self._is_report_due))
            self._asked, self._is_report_due = [], False


def _deliver(requests: Sequence[Request], rollouts: Sequence[Taken]) -> None:
    for request, rollout in zip(requests, rollouts, strict=True):
        if not request.answer.done():
            request.answer.set_result(rollout)


class PlayMeter:
    """Counts of one play; from any thread."""

    def __init__(self, episodes: int, observe: Callable[[EpisodeProgress], None]) -> None:
        self._episodes, self._observe = episodes, observe
        self._lock = threading.Lock()  # guards what follows
        self._began_s = self._idle_since_s = time.monotonic()
        self._running = 0  # calls of the sampler
        self._finished = self._turns = self._tokens = 0
        self._idle_s = 0.0

    @property
    def idle_s(self) -> float:
        """For how long no turn was sampled, because every episode waited for its environment."""
        with self._lock:
            return self._idle_s + (0.0 if self._running else time.monotonic() - self._idle_since_s)

    def begin(self) -> None:
        """Count a call that samples."""
        with self._lock:
            if self._running == 0:
                self._idle_s += time.monotonic() - self._idle_since_s
            self._running += 1

    def end(self) -> None:
        """Count the end of a call, or a pause of it."""
        with self._lock:
            self._running -= 1
            self._idle_since_s = time.monotonic()

    def count(self, requests: Sequence[Request], taken: Sequence[Taken]) -> None:
        """Count turns that were sampled."""
        before = (len(r.asked.rollout.tokens) if isinstance(r.asked, NextTurn) else 0 for r in requests)
        lengths = [len(getattr(turn, "tokens", ())) for turn in taken]
        with self._lock:
            self._turns += sum(map(bool, lengths))
            self._tokens += sum(max(0, new - old) for new, old in zip(lengths, before, strict=True))

    def episode_ended(self) -> None:
        """Count an episode that is over."""
        with self._lock:
            self._finished += 1
        self.show()

    def show(self) -> None:
        """Report how far the play is."""
        took_s = time.monotonic() - self._began_s
        self._observe(EpisodeProgress(self._episodes, self._finished, self._turns, self._tokens, took_s))
