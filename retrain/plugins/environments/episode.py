"""Calls an environment's episode, checks what it returns, and measures how long it takes."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, cast

from retrain.base.event_loop import LeftBehindError, result_of
from retrain.base.json_lines import conversation
from retrain.base.rollouts import Messages, Parts, Prompt, next_prompt
from retrain.base.user_code import located

LARGEST_REWARD = 1e15  # beyond it float64 loses differences of 0.1, and sums of squares may overflow
CLEAN_UP_S = 1.0  # for a coroutine that is cancelled; one that goes on is left behind
RESULT = "(observation, reward, done)"
FIELDS = RESULT.count(",") + 1
# (function, what takes its result if nobody waits for it) -> its result; the function raises nothing
CallAsync: TypeAlias = Callable[[Callable[[], Awaitable[Any]], "float | None"], Awaitable[Any]]
Failure: TypeAlias = Callable[[BaseException], "Exception | None"]  # what an exception comes to
CallPlain: TypeAlias = Callable[[Callable[[], Any], Callable[[Any], object]], Awaitable[Any]]


class EpisodeError(Exception):
    """Why an episode cannot go on; the message names what the environment did."""


class EpisodeTimeoutError(EpisodeError):
    """The environment took too long."""


class EpisodeLostError(EpisodeError):
    """What the episode shared with others ended, perhaps because of them; it is played again, alone."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What an environment returned for a completion."""

    messages: Messages  # none only at the end
    reward: float | None  # None: `[reward]` scores
    parts: Parts
    done: bool


@dataclass(eq=False)
class LiveEpisode:
    """One episode of an environment."""

    open_episode: Callable[[], Any]
    limit_s: float | None  # time that a call may take; None: what is called limits it
    call_plain: CallPlain  # calls a plain function, within the limit; raises LeftBehindError
    call_async: CallAsync  # awaits what a function returns, within a limit: `within`, or in another loop
    end: Callable[[], object] = lambda: None  # called after the last call
    time_s: float = field(default=0.0, init=False)  # spent in the environment
    _episode: Any = field(default=None, init=False)
    _step_is_async: bool = field(default=False, init=False)

    async def start(self, prompt: Prompt) -> Prompt:
        """Open the episode; return what the policy reads first, as a prompt; EpisodeError if that fails."""
        self._episode = await self._call("opening the episode", self.open_episode, unwanted=discard)
        start, step = (
            _sound(outcome(partial(getattr, self._episode, name, None))) for name in ("start", "step")
        )
        if start is None or step is None:
            raise EpisodeError(
                f"opening the episode returned {shown(self._episode)}; needs an object with start and step"
            )
        self._step_is_async = inspect.iscoroutinefunction(step)  # asked once: it takes 10 us
        is_async = inspect.iscoroutinefunction(start)
        result = await self._call("start", partial(start, prompt), is_async=is_async)

        def read() -> Prompt:
            return next_prompt(prompt, _messages("start", result), has_template=True)

        return cast(Prompt, _sound(outcome(read)))

    async def step(self, completion: str) -> Answered:
        """Return the environment's answer; raise EpisodeError if it failed."""
        result = await self._call(
            "step", lambda: self._episode.step(completion), is_async=self._step_is_async
        )
        return cast(Answered, _sound(outcome(partial(_answered, result))))

    @property
    def counts(self) -> tuple[int, int]:
        return counts_of(self._episode)

    async def close(self) -> None:
        """Close the episode; an error of it is ignored, because its result is known."""
        close = attribute(self._episode, "close")
        try:
            if close is not None:
                with contextlib.suppress(EpisodeError):
                    await self._call("close", close)
        finally:
            self.end()

    async def _call(
        self,
        what: str,
        function: Callable[[], Any],
        unwanted: Callable[[Any], object] = lambda _: None,
        *,
        is_async: bool = False,
    ) -> Any:
        began_s = time.perf_counter()
        try:
            if is_async:
                return _sound(await self.call_async(function, self.limit_s))
            result = await self.call_plain(partial(outcome, function), unwanted)
            if inspect.isawaitable(result):
                result = await result_awaited(result, self.limit_s, self.call_async)
            return _sound(result)
        except EpisodeError:
            raise
        except LeftBehindError as error:
            raise EpisodeTimeoutError(f"{what} took longer than {self.limit_s:g} s") from error
        except BaseException as error:
            if is_ours(error):
                raise
            raise EpisodeError(located(error)) from error
        finally:
            self.time_s += time.perf_counter() - began_s


async def within(function: Callable[[], Awaitable[Any]], limit_s: float | None) -> Any:
    """Return what awaiting gives, or the error of an episode; LeftBehindError if it takes too long."""
    task = asyncio.ensure_future(awaited(function))  # of its own, because it may cancel itself
    try:
        if (await asyncio.wait({task}, timeout=limit_s))[0]:
            return task.result()
        raise LeftBehindError
    finally:
        if task.cancel():
            await asyncio.wait({task}, timeout=CLEAN_UP_S)


async def result_awaited(result: Awaitable[Any], limit_s: float | None, call_async: CallAsync) -> Any:
    """Return what awaiting a call's result gives; a coroutine that a blocked loop never began is closed."""
    try:
        return await call_async(lambda: result, limit_s)
    finally:
        if inspect.iscoroutine(result) and inspect.getcoroutinestate(result) == inspect.CORO_CREATED:
            with contextlib.suppress(ValueError):  # begun at this moment
                result.close()


def told(error: EpisodeError | None, prompt: Prompt) -> str:
    """Return why an episode of a prompt failed, "" if it did not."""
    why, named = "" if error is None else str(error), f"prompt {prompt.id}"
    return f"{named}: {why}" if why and not why.startswith(f"{named} ") else why


def counts_of(episode: object) -> tuple[int, int]:
    """Return an episode's `tool_calls` and `tool_errors`, if it has any."""
    calls, errors = (attribute(episode, name) for name in ("tool_calls", "tool_errors"))
    return (calls if isinstance(calls, int) else 0), (errors if isinstance(errors, int) else 0)


def attribute(episode: object, name: str) -> Any:
    """Return an attribute of a user's object; None if it has none, or reading it raises whatever it may."""
    return outcome(partial(getattr, episode, name, None), lambda _: None)


@contextlib.contextmanager
def copies_ended() -> Iterator[None]:
    """Return a context whose end is the end of a copy of this process that a fork in it made."""
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != pid:  # it would go on as if it were this process
            os._exit(0)


def as_failure(error: BaseException) -> EpisodeError:
    """Return an exception as the error of an episode."""
    return error if isinstance(error, EpisodeError) else EpisodeError(located(error))


def outcome(function: Callable[[], Any], failure: Failure = as_failure) -> Any:
    """Return what a function returns, or its failure; an exit of it is an error, too."""
    try:
        with copies_ended():
            return function()
    except BaseException as error:  # noqa: BLE001 - the end of an episode, not of a run
        return failure(error)


async def awaited(function: Callable[[], Any], failure: Failure = as_failure) -> Any:
    """Return what awaiting gives, or the failure; a cancellation by others is raised."""
    try:
        with copies_ended():
            result = function()
            while inspect.isawaitable(result):
                result = await result
            return result
    except BaseException as error:
        if is_ours(error):
            raise
        return failure(error)


def _sound(result: Any) -> Any:
    if isinstance(result, EpisodeError):
        raise result
    return result


def is_ours(error: BaseException) -> bool:
    """Whether an exception ends the task itself, and does not come from the environment."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def discard(episode: object) -> None:
    """Close an episode that opened too late, in a thread, because its caller may be the event loop's."""

    def close() -> None:
        with contextlib.suppress(Exception):
            result_of(episode.close())  # type: ignore[attr-defined]

    if attribute(episode, "close") is not None:
        threading.Thread(target=close, name="late-episode", daemon=True).start()


def _answered(given: Any) -> Answered:
    """Return what a call of step returned, read; it may raise anything."""
    if not isinstance(given, tuple) or len(given) != FIELDS:
        raise EpisodeError(f"step returned {shown(given)}; needs {RESULT}")
    observation, reward, done = given
    number = done.item() if getattr(done, "ndim", None) == 0 else done
    if not isinstance(number, int | float) or number not in (0, 1):  # a text would be true whatever it holds
        raise EpisodeError(f"step returned done = {shown(done)}; needs True or False")
    messages = () if number else _messages("step", observation)
    return Answered(messages, *rewarded("step", reward), bool(number))


def shown(value: object) -> str:
    """Return how a message shows a value, whatever its class does."""
    try:
        return f"{value!r:.60}"
    except Exception:  # noqa: BLE001 - a user's class may raise anything
        return f"a {type(value).__name__}"


def _messages(what: str, given: object) -> Messages:
    if isinstance(given, str) and given:
        return (("user", given),)
    if isinstance(given, list) and given:
        try:
            return conversation(what, given)
        except ValueError as error:
            raise EpisodeError(str(error)) from error
    raise EpisodeError(f"{what} returned {shown(given)}; needs a text or a list of messages, not empty")


def rewarded(what: str, given: object) -> tuple[float | None, Parts]:
    """Return a reward that the call `what` returned, and its parts; EpisodeError if one is not finite."""
    parts: dict[str, float | None] = {}
    if isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[1], Mapping):
        given, numbers = given
        for name, value in numbers.items():
            parts[name] = None if value is None else finite(f"{what}, part {name!r:.80},", value)
    return None if given is None else finite(what, given), parts


def finite(what: str, reward: object) -> float:
    """Return a reward that the call `what` returned; raise EpisodeError if it is not a finite number."""
    try:
        if isinstance(reward, str | bytes | bytearray):
            raise TypeError("a text, which float() would read")
        number = float(reward)  # type: ignore[arg-type]
    except Exception as error:
        raise EpisodeError(f"{what} returned the reward {shown(reward)}; needs a number or None") from error
    if not math.isfinite(number):
        raise EpisodeError(f"{what} returned the reward {number}; needs a finite number")
    if abs(number) > LARGEST_REWARD:
        raise EpisodeError(f"{what} returned the reward {number:g}; needs at most {LARGEST_REWARD:g}")
    return number
