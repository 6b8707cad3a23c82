"""A function of yours in killable processes, with a time limit for each completion.

`reward = "my_rewards.score"` calls a function in the run's own process, which is quicker; this is for
functions that may hang or crash, or are slow enough to be worth several cores.
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
        completion: what the policy wrote.
        prompt: what it was shown, and the answer.
        path: dotted path of a plain or coroutine function `f(completion, prompt, **params) -> float`.
        params: table of keyword arguments for it.
        timeout_s: limit of one call, from when it begins.
        workers: processes that call it at a time; 0 is one for each core.

    Raises:
        ConfigError: there is no such function.
        RunFailedError: it raised.
        TimeoutError: it took longer than `timeout_s`.
        UnscoredError: it raised it, or ended its process.
    """
    scorer = open_scorer(path=path, params=params, timeout_s=timeout_s, workers=workers)
    return score_one(scorer, completion, prompt)


def open_scorer(
    *, path: str, params: Mapping[str, Any] | None = None, timeout_s: float = 30.0, workers: int = 0
) -> BatchScorer:
    """Open a pool of processes that call the function; parameters as for `score`."""
    return FunctionScorer(ProcessPool(path, params or {}, workers=workers, timeout_s=timeout_s))


def check_params(params: Mapping[str, Any]) -> Iterator[str]:
    """Return what is wrong with the parameters; imports the function to see that it is there."""
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
