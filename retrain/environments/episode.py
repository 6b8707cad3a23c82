"""Calls an environment's episode, checks what it returns, and measures how long it takes."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from retrain.demonstrations import as_prompt, conversation
from retrain.event_loop import in_thread, result_of
from retrain.registry.code import located
from retrain.rollouts import Messages, Prompt

RESULT = "(observation, reward, done)"


class EpisodeError(Exception):
    """Why an episode cannot go on; the message names what the environment did."""


class EpisodeTimeoutError(EpisodeError):
    """The environment took too long."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What an environment returned for a completion."""

    messages: Messages  # none only at the end
    reward: float | None  # None: `[reward]` scores
    done: bool


class Conversation:
    """One episode of an environment."""

    def __init__(
        self,
        open_episode: Callable[[], Any],
        limit_s: float,
        *,
        in_threads: bool = False,
        observe: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare.

        Args:
            open_episode: returns the episode.
            limit_s: time that a call may take.
            in_threads: run plain functions in threads.
            observe: called before each call.
        """
        self._open, self._limit_s, self._in_threads = open_episode, limit_s, in_threads
        self._observe = observe
        self._episode: Any = None
        self.time_s = 0.0  # spent in the environment

    async def start(self, prompt: Prompt) -> Prompt:
        """Open the episode; return what the policy reads first, as a prompt of the same number.

        Raises:
            EpisodeError: the environment failed.
        """
        self._episode = await self._call("opening it", self._open, unwanted=_discard)
        given = await self._call("start", partial(self._episode.start, prompt))
        text, answer, messages = as_prompt(_messages("start", given), prompt.answer)
        return replace(prompt, text=text, answer=answer, messages=messages)

    async def step(self, completion: str) -> Answered:
        """Return the environment's answer; raise EpisodeError if it failed."""
        given = await self._call("step", partial(self._episode.step, completion))
        if not isinstance(given, tuple) or len(given) != len(RESULT.split(",")):
            raise EpisodeError(f"step returned {given!r:.60}; needs {RESULT}")
        observation, reward, done = given
        messages = () if done else _messages("step", observation)
        return Answered(messages, None if reward is None else _finite(reward), bool(done))

    async def close(self) -> None:
        """Close the episode; an error of it is ignored, because its result is known."""
        close = getattr(self._episode, "close", None)
        if close is not None:
            try:
                await self._call("close", close)
            except EpisodeError:
                return

    async def _call(
        self, what: str, function: Callable[[], Any], unwanted: Callable[[Any], object] = lambda _: None
    ) -> Any:
        began_s = time.perf_counter()
        self._observe()
        try:
            result = in_thread(function, unwanted) if self._in_threads else function()
            return await self._limited(what, result) if inspect.isawaitable(result) else result
        except EpisodeError:
            raise
        except Exception as error:
            raise EpisodeError(located(error)) from error
        finally:
            self.time_s += time.perf_counter() - began_s

    async def _limited(self, what: str, result: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                while inspect.isawaitable(result):  # a thread's result may be a coroutine
                    result = await result
                return result
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise EpisodeTimeoutError(f"{what} took longer than {self._limit_s:g} s") from error


def _discard(episode: object) -> None:
    """Close an episode that opened too late, in a thread, because its caller may be the event loop's."""

    def close() -> None:
        with contextlib.suppress(Exception):
            result_of(episode.close())  # type: ignore[attr-defined]

    if hasattr(episode, "close"):
        threading.Thread(target=close, name="late-episode", daemon=True).start()


def _messages(what: str, given: object) -> Messages:
    if isinstance(given, str) and given:
        return (("user", given),)
    if isinstance(given, list) and given:
        try:
            return conversation(what, given)
        except ValueError as error:
            raise EpisodeError(str(error)) from error
    raise EpisodeError(f"{what} returned {given!r:.60}; needs a text or a list of messages, not empty")


def _finite(reward: object) -> float:
    try:
        number = float(reward)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise EpisodeError(f"step returned the reward {reward!r:.60}; needs a number or None") from error
    if not math.isfinite(number):
        raise EpisodeError(f"step returned the reward {number}; needs a finite number")
    return number
