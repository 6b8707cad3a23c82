"""Opens a reward by name: the plugin's own scorer, or its function called once for each completion."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from retrain import registry
from retrain.rewards import Answer, BatchScorer, Outcome, Score, UnscoredError

MOST_AT_ONCE = 64  # coroutines in flight: above that, common HTTP clients and servers only queue


def open_scorer(name: str, params: Mapping[str, Any]) -> BatchScorer:
    """Open a reward by TOML name, entry point or dotted path.

    Raises:
        ConfigError: no such reward, or it refuses its parameters.
    """
    function = registry.find("rewards", name)
    opener = companion(function, "open_scorer")
    if opener is not None:
        scorer: BatchScorer = opener(**params)
        return scorer
    bound = partial(function, **params)
    return CoroutineScorer(bound) if inspect.iscoroutinefunction(function) else PlainScorer(bound)


def companion(function: Callable[..., Any], name: str) -> Callable[..., Any] | None:
    """Give the function `name` that a plugin file defines beside its `score`; None if there is none."""
    if getattr(function, "__name__", "") != registry.ENTRY["rewards"]:
        return None
    return getattr(importlib.import_module(function.__module__), name, None)


class PlainScorer:
    """Calls a function for one completion after the other."""

    def __init__(self, function: Callable[..., float]) -> None:
        self._function = function

    def score_all(self, answers: Sequence[Answer]) -> list[Score]:
        """Score every completion, in order."""
        return [self._score(answer) for answer in answers]

    def close(self) -> None:
        """Nothing is held."""

    def _score(self, answer: Answer) -> Score:
        try:
            return Score(float(self._function(answer.completion, answer.prompt)))
        except (UnscoredError, TimeoutError) as error:
            return unscored(error)


class CoroutineScorer:
    """Awaits a coroutine function for many completions at once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def score_all(self, answers: Sequence[Answer]) -> list[Score]:
        """Score every completion, in order; the first exception ends the others."""
        slots = asyncio.Semaphore(MOST_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._score(answer, slots)) for answer in answers]
        return [task.result() for task in tasks]

    def close(self) -> None:
        """Nothing is held."""

    async def _score(self, answer: Answer, slots: asyncio.Semaphore) -> Score:
        async with slots:
            try:
                return Score(float(await self._function(answer.completion, answer.prompt)))
            except (UnscoredError, TimeoutError) as error:
                return unscored(error)


def unscored(error: UnscoredError | TimeoutError) -> Score:
    """Give the score of a completion that a function could not tell."""
    outcome = Outcome.TIMEOUT if isinstance(error, TimeoutError) else Outcome.ERROR
    return Score(None, outcome, str(error))
