"""Your own function in killable processes, with a time limit per completion.

`reward = "my_rewards.score"` calls a function in the run's own process, which is faster; use this for
functions that may hang or crash, or are slow enough to need several cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from retrain import registry
from retrain.errors import ConfigError
from retrain.rewards import BatchScorer
from retrain.rewards.limits import limit_problems
from retrain.rewards.pool import ProcessPool
from retrain.rewards.pool.scorer import FunctionScorer, score_one
from retrain.rollouts import Prompt


def score(
    completion: str,
    prompt: Prompt,
    *,
    path: str,
    params: Mapping[str, Any] | None = None,
    timeout_s: float = 30.0,
    workers: int = 0,
) -> float:
    """Return what the function at `path` returns.

    Args:
        completion: text of the completion.
        prompt: the prompt and its answer.
        path: dotted path of a plain or coroutine function `f(completion, prompt, **params) -> float`.
        params: table of keyword arguments for it.
        timeout_s: limit of one call, from its start.
        workers: number of processes; 0 is one per core.

    Raises:
        ConfigError: there is no such function.
        RunFailedError: the function raised an exception.
        TimeoutError: the call took longer than `timeout_s`.
        UnscoredError: the function raised UnscoredError, or ended its process.
    """
    scorer = open_scorer(path=path, params=params, timeout_s=timeout_s, workers=workers)
    return score_one(scorer, completion, prompt)


def open_scorer(
    *, path: str, params: Mapping[str, Any] | None = None, timeout_s: float = 30.0, workers: int = 0
) -> BatchScorer:
    """Open a pool of processes that call the function; parameters as for `score`."""
    return FunctionScorer(ProcessPool(path, params or {}, workers=workers, timeout_s=timeout_s))


def check_params(params: Mapping[str, Any]) -> Iterator[str]:
    """Return the problems of the parameters; imports the function to check that it exists."""
    yield from limit_problems(params)
    path, arguments = params.get("path", ""), params.get("params", {})
    if not isinstance(path, str) or "." not in path:
        yield f"path: got {path!r}; needs the dotted path of a function, such as 'my_rewards.score'"
        return
    if not isinstance(arguments, Mapping):
        yield f"params: got {arguments!r}; needs a table of arguments for {path!r}"
        return
    try:
        problems = registry.problems_with_params("rewards", path, arguments)
    except ConfigError as error:
        yield f"path: {error}"
        return
    yield from (f"params.{key}: {problem}" for key, problem in problems)
