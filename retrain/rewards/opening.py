"""Opens a reward by name: the plugin's own scorer, or its function called once for each completion."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from retrain import registry
from retrain.errors import RunFailedError
from retrain.rewards import Answer, BatchScorer, Outcome, Score, UnscoredError
from retrain.rewards.number import number_of
from retrain.rewards.pool.interrupt import interrupted_after

MOST_AT_ONCE = 64  # coroutines in flight: above that, common HTTP clients and servers only queue
LIMIT_S = 600.0  # of one call: nothing that is meant to be waited for takes so long
TOO_LONG = 'took over {:g} s; reward = "custom" has a timeout_s of its own'


def open_scorer(name: str, params: Mapping[str, Any]) -> BatchScorer:
    """Open a reward by TOML name, entry point or dotted path.

    Raises:
        ConfigError: no such reward, or it refuses its parameters.
    """
    opener = registry.hook("rewards", name, "open_scorer")
    if opener is not None:
        scorer: BatchScorer = opener(**params)
        return scorer
    return CallingScorer(partial(registry.find("rewards", name), **params))


class CallingScorer:
    """Calls a function for one completion after the other; what gives awaitables is awaited many at once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def score_all(self, answers: Sequence[Answer]) -> list[Score] | Awaitable[list[Score]]:
        """Score every completion, in order.

        Raises:
            RunFailedError: a reward is no number, or left; names the prompt. What else the function raises
                stays as it is.
        """
        given: list[Any] = []
        try:
            given.extend(map(self._call, answers))
        except BaseException:
            close_unawaited(given)
            raise
        if any(map(inspect.isawaitable, given)):
            return self._await_all(answers, given)
        return [_score_of(answer, one) for answer, one in zip(answers, given, strict=True)]

    def close(self) -> None:
        """Nothing is held."""

    def _call(self, answer: Answer) -> Any:
        try:
            with interrupted_after(LIMIT_S, TOO_LONG.format(LIMIT_S)):
                return self._function(answer.completion, answer.prompt)
        except (UnscoredError, TimeoutError) as error:
            return unscored(error)
        except SystemExit as error:
            raise _left(answer, error) from error

    async def _await_all(self, answers: Sequence[Answer], given: Sequence[Any]) -> list[Score]:
        """Await what is awaitable; the first exception ends the others, and comes out as it is."""
        slots = asyncio.Semaphore(MOST_AT_ONCE)
        tasks = [
            asyncio.ensure_future(_awaited(answer, one, slots))
            for answer, one in zip(answers, given, strict=True)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            close_unawaited(given)


async def _awaited(answer: Answer, given: Any, slots: asyncio.Semaphore) -> Score:
    if not inspect.isawaitable(given):
        return _score_of(answer, given)
    async with slots:
        try:
            async with asyncio.timeout(LIMIT_S) as limit:
                return _score_of(answer, await given)
        except (UnscoredError, TimeoutError) as error:
            return unscored(TimeoutError(TOO_LONG.format(LIMIT_S)) if limit.expired() else error)
        except SystemExit as error:
            raise _left(answer, error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return unscored(UnscoredError("the reward was cancelled from within"))


def _left(answer: Answer, error: SystemExit) -> RunFailedError:
    return RunFailedError(
        f"the reward of prompt {answer.prompt.id} called sys.exit({error.code!r}); "
        'use reward = "custom" for code that may end its process'
    )


def _score_of(answer: Answer, given: Any) -> Score:
    if isinstance(given, Score):
        return given
    try:
        return Score(number_of(given))
    except TypeError as error:
        raise RunFailedError(f"the reward of prompt {answer.prompt.id} {error}") from error


def close_unawaited(given: Sequence[Any]) -> None:
    """Close coroutines that nobody will await; finished ones do not mind."""
    for one in given:
        if inspect.iscoroutine(one):
            one.close()


def unscored(error: UnscoredError | TimeoutError) -> Score:
    """Return the score of a completion that a function could not tell."""
    outcome = Outcome.TIMEOUT if isinstance(error, TimeoutError) else Outcome.ERROR
    return Score(None, outcome, str(error))
