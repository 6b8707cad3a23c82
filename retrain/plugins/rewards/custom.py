"""Your own function in killable processes, with a time limit per completion.

`reward = "my_rewards.score"` calls a function in the run's own process, which is faster; use this for
functions that may hang or crash, or are slow enough to need several cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from retrain.base import registry
from retrain.base.errors import Problem
from retrain.base.registry import Positive, Workers
from retrain.plugins.rewards import BatchScorer, score_with
from retrain.plugins.rewards.pool import FunctionScorer
from retrain.plugins.sandbox import choice_problems, with_sandbox

PURE = True  # if the function is


def open_scorer(
    *,
    path: str,
    params: Mapping[str, Any] | None = None,
    timeout_s: Positive = 30.0,
    workers: Workers = 0,
    sandbox: str = "auto",
    sandbox_options: Mapping[str, Any] | None = None,
) -> BatchScorer:
    """Score with what the function at `path` returns.

    A completion is unscored if the function raises UnscoredError, takes too long or ends its process; any
    other exception fails the run.

    Args:
        path: dotted path of a plain or coroutine function `f(completion, prompt, **params) -> float`.
        params: table of keyword arguments for it.
        timeout_s: limit of one call, from its start.
        workers: number of processes; 0 is one per core.
        sandbox: for a function with parameters `sandbox` and `sandbox_options` that is given no sandbox in
            `params`; see the reward "python".
        sandbox_options: its options.
    """
    shared = {"sandbox": sandbox, "sandbox_options": sandbox_options}
    return FunctionScorer(path, params or {}, workers=workers, timeout_s=timeout_s, sandbox=shared)


score = score_with(open_scorer)


def made_of(params: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the function and its parameters, with a sandbox that this one was given."""
    return [(params["path"], with_sandbox(params.get("params", {}), params))]


def check_params(params: Mapping[str, Any]) -> Iterator[Problem]:
    """Return the problems of the parameters; imports the function to check that it exists."""
    path, arguments = params["path"], params.get("params", {})
    if "." not in path:
        what = f"got {path!r}; needs the dotted path of a function, such as 'my_rewards.score'"
        yield Problem(("path",), what)
        return
    if problem := registry.problem_with_name("rewards", path):
        yield Problem(("path",), problem)
        return
    wrong = registry.problems_with_table("rewards", path, arguments)
    yield from (problem.below("params") for problem in wrong)
    yield from choice_problems(params)
