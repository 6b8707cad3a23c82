"""Plays episodes of programs, which bring their own loop and call the policy at an address of this worker."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from retrain.backends import Sampling
from retrain.base.event_loop import LeftBehindError, in_thread
from retrain.base.rollouts import Episode, Parts, Prompt, Rollout
from retrain.config.schema import EnvironmentSection
from retrain.plugins.environments.calls import CoroutineLoop, check_held_up
from retrain.plugins.environments.endpoint import Endpoint
from retrain.plugins.environments.endpoint.session import Ask, EpisodeLimits, EpisodeSession, Rendering
from retrain.plugins.environments.episode import (
    CallAsync,
    EpisodeError,
    EpisodeLostError,
    EpisodeTimeoutError,
    attribute,
    discard,
    outcome,
    result_awaited,
    rewarded,
    told,
)


@dataclass(eq=False)
class Programs:
    """The programs of a run, and the endpoint that serves them."""

    table: EnvironmentSection
    open_episode: Callable[[], Any]
    rendering: Rendering

    def __post_init__(self) -> None:
        self._endpoint = Endpoint()

    async def play(self, ask: Ask, prompt: Prompt, how: Sampling, loop: CoroutineLoop) -> Rollout:
        """Run a program for a prompt; return its last conversation, with the others in its episode.

        Raises:
            EpisodeLostError: something blocked the event loop that it shares with others.
        """
        began_s = time.perf_counter()
        table = self.table
        limits = EpisodeLimits(table.max_turns, how.max_tokens, table.max_turn_tokens or how.max_tokens)
        session = EpisodeSession(prompt, ask, limits, self.rendering, is_stitched=not table.separate_turns)
        reward, parts, error = await self._run(session, prompt, loop)
        time_s = time.perf_counter() - began_s
        *others, last = [talk.rollout for talk in session.conversations] or [Rollout(prompt)]
        episode = Episode(
            rewards=(None,) * (session.turns - 1) + (reward,),
            reward=reward,
            parts=parts,
            error=told(error, prompt),
            timed_out=isinstance(error, EpisodeTimeoutError),
            time_s=time_s,
            environment_s=time_s - session.waited_s,
            others=tuple(others),
            tool_calls=session.calling.count,
            cut_turns=tuple(session.cut_turns),
        )
        return replace(last, truncated=session.is_cut, episode=episode)

    async def _run(
        self, session: EpisodeSession, prompt: Prompt, loop: CoroutineLoop
    ) -> tuple[float | None, Parts, EpisodeError | None]:
        """Return an episode's reward with its parts, and why it failed."""
        table = self.table
        parts: Parts = {}
        error: EpisodeError | None = None
        try:
            with self._endpoint.serving(session) as key:
                arguments, limit_s = (prompt, self._endpoint.url, key), table.time_limit_s
                result = await _run_program(self.open_episode, session, arguments, limit_s, loop.call)
            reward, parts = rewarded("run", result)
        except EpisodeLostError:
            raise
        except EpisodeError as failure:
            reward, error = table.error_reward, failure
            is_refusal = session.refused and session.refused not in str(failure)
            if session.is_cut:
                reward, error = 0.0, None
            elif is_refusal and not isinstance(failure, EpisodeTimeoutError):
                error = EpisodeError(f"{failure}; the endpoint had refused its request: {session.refused}")
        if session.is_cut and table.truncated_reward is not None:
            reward, parts = table.truncated_reward, {}
        return reward, parts, error

    def close(self) -> None:
        self._endpoint.close()


async def _run_program(
    open_episode: Callable[[], Any],
    session: EpisodeSession,
    arguments: tuple[Prompt, str, str],
    limit_s: float,
    call_async: CallAsync,
) -> object:
    """Open an episode, run its program to the end, and return its reward; plain functions run in a thread.

    Raises:
        EpisodeError: it raised, or neither asked for a turn nor ended for `limit_s`.
        EpisodeLostError: it did so while another held up its event loop.
    """
    opened: list[Any] = []

    def begin() -> Any:
        program = open_episode()
        opened.append(program)
        return program.run(*arguments)

    def close_late(_: object) -> None:
        if opened:
            discard(opened.pop())

    task = asyncio.ensure_future(_outcome(begin, None, call_async, close_late))
    try:
        while not task.done():
            left_s = limit_s - session.idle_s()
            if left_s > 0:
                await asyncio.wait({task}, timeout=left_s)
            elif await _is_late(task, session, limit_s, call_async):
                raise EpisodeTimeoutError(f"run neither asked for a turn nor ended for {limit_s:g} s")
        if task.cancelled():  # by itself
            raise EpisodeError("run cancelled its own task")
        result: object = task.result()
        if isinstance(result, EpisodeError):
            raise result
        return result
    finally:
        task.cancel()
        if opened and (close := attribute(opened.pop(), "close")):
            with suppress(TimeoutError, LeftBehindError, EpisodeError):  # ignored: the result is known
                await asyncio.wait_for(_outcome(close, limit_s, call_async), limit_s)


async def _is_late(
    task: asyncio.Task[Any], session: EpisodeSession, limit_s: float, call_async: CallAsync
) -> bool:
    """Return whether a program goes on although its event loop was free; EpisodeLostError if it was not."""
    since_s = time.monotonic() - session.idle_s()

    async def check() -> None:
        check_held_up(since_s, limit_s)

    checked = asyncio.ensure_future(call_async(check, None))
    try:
        await asyncio.wait({task, checked}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return False
        if isinstance(error := checked.result(), EpisodeError):
            raise error
        return True
    finally:
        checked.cancel()
        await asyncio.gather(checked, return_exceptions=True)


async def _outcome(
    function: Callable[[], Any],
    limit_s: float | None,
    call_async: CallAsync,
    unwanted: Callable[[Any], object] = lambda _: None,
) -> Any:
    """Return what a function gives, called in a thread and awaited if need be, or the error of an episode."""
    result = await in_thread(partial(outcome, function), unwanted)
    return await result_awaited(result, limit_s, call_async) if inspect.isawaitable(result) else result
