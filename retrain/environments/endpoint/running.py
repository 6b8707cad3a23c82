"""Runs the program of an episode, while the policy is served to it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from retrain.environments.endpoint.session import Session
from retrain.environments.episode import CallAsync, EpisodeError, EpisodeTimeoutError, attribute, outcome
from retrain.environments.in_turn import LeftBehindError
from retrain.event_loop import in_thread
from retrain.rollouts import Prompt


async def run_program(
    open_episode: Callable[[], Any],
    session: Session,
    arguments: tuple[Prompt, str, str],
    limit_s: float,
    call_async: CallAsync,
) -> object:
    """Open an episode, run its program to the end, and return its reward; plain functions run in a thread.

    Raises:
        EpisodeError: it raised, or neither asked for a turn nor ended for `limit_s`.
    """
    opened: list[Any] = []

    def begin() -> Any:
        opened.append(open_episode())
        return opened[0].run(*arguments)

    task = asyncio.ensure_future(_outcome(begin, None, call_async))
    try:
        while not task.done():
            left_s = limit_s - session.idle_s()
            if left_s > 0:
                await asyncio.wait({task}, timeout=left_s)
            elif not await _ends_while_loop_is_blocked(task, call_async):
                raise EpisodeTimeoutError(f"run neither asked for a turn nor ended for {limit_s:g} s")
        if task.cancelled():  # by itself
            raise EpisodeError("run cancelled its own task")
        found: object = task.result()
        if isinstance(found, EpisodeError):
            raise found
        return found
    finally:
        task.cancel()
        for close in filter(None, (attribute(one, "close") for one in opened)):
            with suppress(TimeoutError, LeftBehindError, EpisodeError):  # ignored: the result is known
                await asyncio.wait_for(_outcome(close, limit_s, call_async), limit_s)


async def _ends_while_loop_is_blocked(task: asyncio.Task[Any], call_async: CallAsync) -> bool:
    """Whether a program ends before its event loop answers, which others may block."""
    answer = asyncio.ensure_future(call_async(partial(asyncio.sleep, 0), None))
    try:
        await asyncio.wait({task, answer}, return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)


async def _outcome(function: Callable[[], Any], limit_s: float | None, call_async: CallAsync) -> Any:
    """Return what a function gives, called in a thread and awaited if need be, or the error of an episode."""
    result = await in_thread(partial(outcome, function))
    return await call_async(lambda: result, limit_s) if inspect.isawaitable(result) else result
