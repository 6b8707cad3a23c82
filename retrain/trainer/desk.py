"""Where episodes ask for turns, and the thread that samples answers."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from retrain.environments.episode import CallPlain, EpisodeError
from retrain.errors import FullContextError, InterruptedRunError, PromptError
from retrain.rollouts import FirstTurn, NextTurn, Prompt, Rollout

Asked: TypeAlias = Prompt | FirstTurn | NextTurn
Taken: TypeAlias = Rollout | PromptError | None
LOOK_S = 1.0  # between looks at whether the run is to stop


@dataclass(slots=True, eq=False)
class Request:
    """What an episode asks for, and where its answer goes."""

    asked: Asked
    answer: asyncio.Future[Taken]


class Desk:
    """The requests of the episodes that are played together."""

    def __init__(self, is_leaving: Callable[[], bool]) -> None:
        """Open; no further turn is sampled once the run is to stop."""
        self._is_leaving = is_leaving
        self._asked: list[Request] = []
        self._held = 0  # calls that requests wait for
        self._is_due = False  # whether the loop will pass requests on
        self._batches: queue.SimpleQueue[list[Request]] = queue.SimpleQueue()

    async def ask(self, asked: Asked) -> Rollout | None:
        """Wait for a turn; all that are asked for before the loop looks for events are one batch.

        Returns:
            None: the conversation leaves no room for a turn.

        Raises:
            EpisodeError: the model cannot read the messages, or the newest ones alone fill its context.
        """
        taken, told = await self._taken(asked), getattr(asked, "told", None)
        if isinstance(taken, FullContextError) and told is not None:
            alone = await self._taken(FirstTurn(told, 1))
            taken = alone if isinstance(alone, FullContextError) else None
        if isinstance(taken, PromptError):
            raise EpisodeError(str(taken))
        return taken

    async def _taken(self, asked: Asked) -> Taken:
        request = Request(asked, asyncio.get_running_loop().create_future())
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

    def next_batch(self) -> list[Request]:
        """Wait for requests and return all there are; none once the desk is closed."""
        batch = self._next()
        while batch and not self._batches.empty():
            if not (more := self._batches.get()):
                self.close()
                break
            batch = [*batch, *more]
        return batch

    def answer(self, requests: Sequence[Request], rollouts: Sequence[Taken]) -> None:
        """Pass on rollouts to those who asked, all at once, so that they take their turns together."""
        requests[0].answer.get_loop().call_soon_threadsafe(_deliver, requests, rollouts)

    def close(self) -> None:
        self._batches.put([])

    def _next(self) -> list[Request]:
        while True:
            self._check_stop()
            with suppress(queue.Empty):
                return self._batches.get(timeout=LOOK_S)

    def _check_stop(self) -> None:
        if self._is_leaving():
            raise InterruptedRunError("a stop was requested while episodes were played")

    def _pass_on_soon(self) -> None:
        if not (self._is_due or self._held):
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._pass_on)

    def _pass_on(self) -> None:
        self._is_due = False
        if self._asked and not self._held:
            asked, self._asked = self._asked, []
            self._batches.put(asked)


def _deliver(requests: Sequence[Request], rollouts: Sequence[Taken]) -> None:
    for request, rollout in zip(requests, rollouts, strict=True):
        if not request.answer.done():
            request.answer.set_result(rollout)
