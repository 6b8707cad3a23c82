"""Runs the program of an episode, while the policy is served to it."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from retrain.environments.coroutine_loop import check_held_up
from retrain.environments.endpoint.session import EpisodeSession
from retrain.environments.episode import (
    CallAsync,
    EpisodeError,
    EpisodeTimeoutError,
    attribute,
    outcome,
    result_awaited,
)
from retrain.environments.plain_calls import LeftBehindError
from retrain.event_loop import in_thread
from retrain.rollouts import Prompt


async def run_program(
    open_episode: Callable[[], Any],
    session: EpisodeSession,
    arguments: tuple[Prompt, str, str],
    limit_s: float,
    call_async: CallAsync,
) -> object:
    """Open an episode, run its program to the end, and return its reward; plain functions run in a thread.

    Raises:
        EpisodeError: it raised, or neither asked for a turn nor ended for `limit_s`.
        EpisodeLostError: it did so while others held up its event loop.
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
            elif await _is_late(task, session, limit_s, call_async):
                raise EpisodeTimeoutError(f"run neither asked for a turn nor ended for {limit_s:g} s")
        if task.cancelled():  # by itself
            raise EpisodeError("run cancelled its own task")
        found: object = task.result()
        if isinstance(found, EpisodeError):
            await _check_held_up(session, limit_s, call_async)
            raise found
        return found
    finally:
        task.cancel()
        for close in filter(None, (attribute(one, "close") for one in opened)):
            with suppress(TimeoutError, LeftBehindError, EpisodeError):  # ignored: the result is known
                await asyncio.wait_for(_outcome(close, limit_s, call_async), limit_s)


async def _is_late(
    task: asyncio.Task[Any], session: EpisodeSession, limit_s: float, call_async: CallAsync
) -> bool:
    """Return whether a program goes on although its event loop had time for it; errors of the check."""
    checked = asyncio.ensure_future(_check_held_up(session, limit_s, call_async))
    try:
        await asyncio.wait({task, checked}, return_when=asyncio.FIRST_COMPLETED)
        return not task.done() and checked.result() is None
    finally:
        checked.cancel()
        await asyncio.gather(checked, return_exceptions=True)


async def _check_held_up(session: EpisodeSession, limit_s: float, call_async: CallAsync) -> None:
    """Raise EpisodeLostError if others held up the event loop since the program's last turn."""
    since_s = time.monotonic() - session.idle_s()

    async def check() -> None:
        check_held_up(since_s, limit_s)

    if isinstance(error := await call_async(check, None), EpisodeError):
        raise error


async def _outcome(function: Callable[[], Any], limit_s: float | None, call_async: CallAsync) -> Any:
    """Return what a function gives, called in a thread and awaited if need be, or the error of an episode."""
    result = await in_thread(partial(outcome, function))
    return await result_awaited(result, limit_s, call_async) if inspect.isawaitable(result) else result
