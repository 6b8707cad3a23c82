"""Where episodes ask for turns, and what answers: calls of the sampler, or a feed.

A server samples a call's turns beside those of others: no episode then waits for the longest turn of a call
that it is no part of. What is asked for while all calls are busy is sampled together in the next one.

A backend that takes turns while it samples others is fed, so that no episode waits for another one's turn.
Turns of coroutines, threads and processes are fed as they come. Plain functions are waited for at moments
that depend on nothing but the turns, so that the same turns are sampled together each time.
"""

from __future__ import annotations

import asyncio
import queue
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Any, TypeAlias, TypeVar

import numpy as np

from retrain.backends import Backend, Sampling
from retrain.backends.progress import EpisodeProgress
from retrain.backends.rows import LiveTurn, Taken
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
        self.is_free = True
        return await call(function, limit_s)

    def next_batch(self) -> list[Request]:
        """Wait for requests and return all there are; none once the queue is closed."""
        requests: list[Request] = []
        while not (requests or self.is_closed):
            requests += self._receive()[0]
        return [*requests, *self.come()]

    def come(self) -> list[Request]:
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

        # in a later round of the loop: those who are answered take their turn first
        self._loop.call_soon_threadsafe(self._loop.call_soon, report)
        requests, is_report = [], False
        while not (is_report or self.is_closed):
            more, is_report = self._receive()
            requests += more
        return requests

    def answer(self, requests: Sequence[Request], rollouts: Sequence[Taken]) -> None:
        """Pass on rollouts to those who asked, all at once, so that they take their turns together."""

        def deliver() -> None:
            for request, rollout in zip(requests, rollouts, strict=True):
                if not request.answer.done():
                    request.answer.set_result(rollout)

        requests[0].answer.get_loop().call_soon_threadsafe(deliver)

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
        before = (len(r.asked.rollout.tokens) if isinstance(r.asked, NextTurn) else 0 for r in requests)
        lengths = [len(getattr(turn, "tokens", ())) for turn in taken]
        with self._lock:
            self._turns += sum(map(bool, lengths))
            self._tokens += sum(max(0, new - old) for new, old in zip(lengths, before, strict=True))

    def show(self, *, finished: int = 0) -> None:
        """Report how far the play is, after so many episodes more are over."""
        with self._lock:
            self._finished += finished
        took_s = time.monotonic() - self._began_s
        self._observe(EpisodeProgress(self._episodes, self._finished, self._turns, self._tokens, took_s))


T = TypeVar("T")
Sample: TypeAlias = Callable[[Sequence[Asked], int], Sequence[Taken]]  # with the number of the call
SampleTurns: TypeAlias = Callable[[Sequence[Asked], Sampling], Sequence[Taken]]


class TurnCalls:
    """The calls for the episodes of one play."""

    def __init__(self, queue: TurnQueue, sample: Sample, meter: PlayMeter) -> None:
        self._queue, self._sample, self._meter = queue, sample, meter
        self._failure: BaseException | None = None

    def serve(self, at_once: int) -> None:
        """Answer until the queue is closed; raise an error of the sampler."""
        numbers, free = count(), threading.Semaphore(at_once)
        with ExitStack() as opened:
            threads = opened.enter_context(ThreadPoolExecutor(at_once)) if at_once > 1 else None
            while free.acquire() and (requests := self._queue.next_batch()):
                if threads is None:
                    self._call(requests, next(numbers), free)
                else:
                    # its cost is counted where the caller's is
                    threads.submit(copy_context().run, self._call, requests, next(numbers), free)
        if self._failure is not None:
            raise self._failure

    def _call(self, requests: Sequence[Request], number: int, free: threading.Semaphore) -> None:
        self._meter.begin()
        try:
            taken = self._sample([request.asked for request in requests], number)
            self._meter.count(requests, taken)
            self._queue.answer(requests, taken)
        except BaseException as error:  # noqa: BLE001 - raised by `serve`
            self._failure = self._failure or error
            self._queue.close()
        finally:
            self._meter.end()
            free.release()
        self._meter.show()


class PlayEndedError(Exception):
    """The play ended while turns were sampled, because it failed."""


class PlayTurnFeed:
    """The turns of one play; implements `retrain.backends.rows.TurnFeed`."""

    def __init__(self, queue: TurnQueue, how: Sampling, max_turn_tokens: int, meter: PlayMeter) -> None:
        """Prepare; 0 is no limit of a turn's own."""
        self._queue, self._meter = queue, meter
        self._first_limit = min(how.max_tokens, max_turn_tokens or how.max_tokens)
        self._seed = secrets.randbits(63) if how.seed is None else how.seed
        self._requests: dict[LiveTurn, Request] = {}
        self._answered = 0  # turns since plain functions were waited for

    def serve(self, sample: Callable[[PlayTurnFeed], object]) -> None:
        """Have turns sampled until the queue is closed."""
        self._meter.begin()
        try:
            with suppress(PlayEndedError):
                sample(self)
        finally:
            self._meter.end()

    def take(self, under_way: int) -> Sequence[LiveTurn]:
        self._queue.check_stop()
        if self._queue.is_free and under_way:
            requests = self._queue.come()
        elif self._answered >= under_way:
            requests = self._waited_for(under_way)
        else:
            return ()
        if under_way and self._queue.is_closed:
            raise PlayEndedError
        unanswered = [request for request in requests if not request.answer.done()]
        turns = [self._turn(request) for request in sorted(unanswered, key=lambda request: request.place)]
        return turns if turns or under_way or self._queue.is_closed else self.take(under_way)

    def answer(self, taken: Sequence[tuple[LiveTurn, Taken]]) -> None:
        requests = [self._requests.pop(turn) for turn, _ in taken]
        rollouts = [rollout for _, rollout in taken]
        self._answered += len(requests)
        self._meter.count(requests, rollouts)
        self._queue.answer(requests, rollouts)
        self._meter.show()

    def _waited_for(self, under_way: int) -> list[Request]:
        """Wait for what plain functions answer; with no turn under way, for any."""
        self._meter.end()
        try:
            requests = self._queue.settled() if self._answered else []
            self._answered = 0
            return requests or ([] if under_way else self._queue.next_batch())
        finally:
            self._meter.begin()

    def _turn(self, request: Request) -> LiveTurn:
        asked = request.asked
        turn = FirstTurn(asked, self._first_limit) if isinstance(asked, Prompt) else asked
        # ten times faster than numpy's SeedSequence, and a step may have thousands of turns
        named = blake2b(repr((self._seed, *request.place)).encode(), digest_size=8).digest()
        live = LiveTurn(turn, int.from_bytes(named) >> 1)
        self._requests[live] = request
        return live


@dataclass(frozen=True)
class TurnSampler:
    """Samples turns with a backend."""

    backend: Backend
    max_turn_tokens: int  # 0: `max_tokens` alone is the limit

    def __call__(self, asked: Sequence[Asked], how: Sampling) -> list[Taken]:
        """Sample the first turns, then the others; an error in place of one that cannot be read."""
        limit = min(how.max_tokens, self.max_turn_tokens or how.max_tokens)
        first_turns = [
            FirstTurn(turn, limit) if isinstance(turn, Prompt) else turn
            for turn in asked
            if not isinstance(turn, NextTurn)
        ]
        part = count()

        def begin(turns: Sequence[FirstTurn]) -> list[Taken]:
            """Sample with one call for each limit."""
            taken: dict[int, Taken] = {}
            for most in sorted({turn.max_tokens for turn in turns}):
                alike = [number for number, turn in enumerate(turns) if turn.max_tokens == most]
                of_call = replace(of_its_own(how, next(part)), max_tokens=most)
                groups = self.backend.sample([turns[n].prompt for n in alike], of_call)
                taken |= zip(alike, (group.rollouts[0] for group in groups), strict=True)
            return [taken[number] for number in range(len(turns))]

        def extend(turns: Sequence[NextTurn]) -> list[Taken]:
            return list(self.backend.extend(turns, of_its_own(how, next(part))))

        begun = iter(_readable(first_turns, begin))
        extended = iter(_readable([turn for turn in asked if isinstance(turn, NextTurn)], extend))
        return [next(extended if isinstance(turn, NextTurn) else begun) for turn in asked]


def of_its_own(how: Sampling, part: int) -> Sampling:
    """Return how to sample a part: with random numbers of its own, where a seed determines them."""
    if how.seed is None:
        return how
    return replace(how, seed=int(np.random.SeedSequence([how.seed, part]).generate_state(1)[0]))


def _readable(asked: Sequence[T], sample: Callable[[Sequence[T]], list[Taken]]) -> list[Taken]:
    """Sample what the model can read; halves are tried until an unreadable one is alone."""
    if not asked:
        return []
    try:
        return sample(asked)
    except PromptError as error:
        if len(asked) == 1:
            return [error]
    half = len(asked) // 2
    return [*_readable(asked[:half], sample), *_readable(asked[half:], sample)]
