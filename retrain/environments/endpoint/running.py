"""Runs the program of an episode, while the policy is served to it."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from retrain.environments.endpoint.session import Session
from retrain.environments.episode import (
    CallAsync,
    EpisodeError,
    EpisodeTimeoutError,
    attribute,
    outcome,
    result_awaited,
)
from retrain.environments.in_turn import LeftBehindError
from retrain.event_loop import in_thread
from retrain.rollouts import Prompt


async def run_program(
    open_episode: Callable[[], Any],
    session: Session,
    arguments: tuple[Prompt, str, str],
    limit_s: float,
    call_async: CallAsync,
    check_late: Callable[[float], object] = lambda late_s: None,
) -> object:
    """Open an episode, run its program to the end, and return its reward; plain functions run in a thread.

    Args:
        check_late: raises the error of a program whose limit passed while its event loop was blocked.

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
            elif (late_s := await _blocked_s(task, call_async)) is not None:
                check_late(late_s)
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


async def _blocked_s(task: asyncio.Task[Any], call_async: CallAsync) -> float | None:
    """Return how long a program's event loop takes to answer; None: the program ends before."""
    began_s = time.monotonic()
    answer = asyncio.ensure_future(call_async(partial(asyncio.sleep, 0), None))
    try:
        await asyncio.wait({task, answer}, return_when=asyncio.FIRST_COMPLETED)
        return None if task.done() else time.monotonic() - began_s
    finally:
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)


async def _outcome(function: Callable[[], Any], limit_s: float | None, call_async: CallAsync) -> Any:
    """Return what a function gives, called in a thread and awaited if need be, or the error of an episode."""
    result = await in_thread(partial(outcome, function))
    return await result_awaited(result, limit_s, call_async) if inspect.isawaitable(result) else result
