"""Tries what can be tried before anything is created: options and parameters that only plugins know.

Builds each distinct task (which says how long answers are), asks backends to check their options,
and evaluates plugins that were given parameters on a tiny example, so that a value out of range
is found at plan time.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from retrain import extras, registry
from retrain.config.checks import PLUGINS
from retrain.errors import ConfigError
from retrain.plan.flow import flow_settings
from retrain.plan.matrix import Plan, RunPlan

if TYPE_CHECKING:
    from retrain.tasks import Task


@dataclass(frozen=True)
class TaskFacts:
    """What planning wants to know of a condition's task."""

    train_prompts: int
    held_out_prompts: int
    longest_answer: int


def preflight(plan: Plan, source: str) -> dict[str, TaskFacts]:
    """Check plugins' options for every condition.

    Returns:
        Facts of each condition's task.

    Raises:
        ConfigError: every problem found.
    """
    facts: dict[str, TaskFacts] = {}
    problems: dict[str, None] = {}
    seen: dict[str, TaskFacts] = {}
    for run in {run.condition: run for run in plan.runs}.values():  # a seed changes nothing here
        data = run.config.data
        key = json.dumps([data.task, data.options, data.seed], default=str, sort_keys=True)
        try:
            facts[run.condition] = seen[key] = seen.get(key) or _task_facts(run)
        except ConfigError as error:
            problems.update(dict.fromkeys(f"{source} [data.options]{_joined(p)}" for p in error.problems))
        problems.update(dict.fromkeys(f"{source} {p}" for p in _problems(run)))
        flow = flow_settings(run.config)
        problems.update(
            dict.fromkeys(f"{source} [rate_limiter].{p}" for p in (flow.problems() if flow else ()))
        )
    problems.update(dict.fromkeys(f"{source} {p}" for p in _permit_conflicts(plan)))
    if problems:
        raise ConfigError(list(problems))
    return facts


def _permit_conflicts(plan: Plan) -> Iterator[str]:
    wanted: dict[str, set[int]] = {}
    for run in plan.runs:
        wanted.setdefault(run.config.backend.throttle_dir, set()).add(run.config.backend.max_concurrent)
    for counts in wanted.values():
        if len(counts) > 1:
            yield (
                f"[backend].max_concurrent: conditions ask for {sorted(counts)} permits of one semaphore; "
                f"use one number, or give each its own throttle_dir"
            )


def _task_facts(run: RunPlan) -> TaskFacts:
    data = run.config.data
    task: Task = registry.find("tasks", data.task)(seed=data.seed, **data.options)
    return TaskFacts(len(task.train), len(task.held_out), task.longest_answer)


def _problems(run: RunPlan) -> Iterator[str]:
    for section, key, kind, params_key, _ in PLUGINS:
        table = getattr(run.config, section)
        name, params = getattr(table, key), getattr(table, params_key)
        if kind != "tasks" and (missing := extras.missing_problem(kind, name)):  # tasks were built before
            yield f"[{section}].{key}: {missing}"
        elif kind == "backends":
            yield from (f"[backend.options].{p}" for p in _option_problems(name, params))
        elif kind == "rewards":
            yield from (f"[reward.params].{problem}" for problem in _reward_problems(name, params))
        elif params and kind in _EXAMPLES and name in registry.built_in_names(kind):  # never runs users' code
            try:
                _EXAMPLES[kind](registry.find(kind, name), params)
            except ValueError as error:
                yield f"[{section}.{params_key}]: {error}"


def _option_problems(name: str, options: Mapping[str, Any]) -> list[str]:
    connect = (
        registry.find("backends", name)
        if options or name not in registry.built_in_names("backends")
        else None
    )
    if connect is None:
        return []
    check = getattr(importlib.import_module(connect.__module__), "check_options", None)
    return list(check(options)) if check is not None else []


def _try_advantage(estimate: Callable[..., Any], params: Mapping[str, Any]) -> None:
    import numpy as np

    estimate(np.array([[0.0, 1.0]]), **params)


def _try_transform(reweigh: Callable[..., Any], params: Mapping[str, Any]) -> None:
    import numpy as np

    from retrain.rollouts import Prompt, Rollout

    rollout = Rollout(Prompt(0, "a=", "a"), "a", (0, 1), np.array([-0.5, -1.0]), ("a", ""), truncated=False)
    reweigh(rollout, 1.0, 0.5, **params)


def _try_loss(evaluate: Callable[..., Any], params: Mapping[str, Any]) -> None:
    import numpy as np

    logprobs = np.array([-0.5, -1.0])
    evaluate(logprobs, logprobs, np.ones(2), np.zeros(2, dtype=np.int64), **params)


def _reward_problems(name: str, params: Mapping[str, Any]) -> list[str]:
    """Ask a built-in reward that can tell; try out the others, which need no process and no network."""
    if name not in registry.built_in_names("rewards"):  # never runs users' code
        return []
    score = registry.find("rewards", name)
    check = getattr(importlib.import_module(score.__module__), "check_params", None)
    if check is not None:
        return list(check(params))
    from retrain.rollouts import Prompt

    try:
        score("a", Prompt(0, "a=", "a"), **params)
    except ValueError as error:
        return [str(error)]
    return []


_EXAMPLES: Mapping[str, Callable[[Callable[..., Any], Mapping[str, Any]], None]] = {
    "advantages": _try_advantage,
    "transforms": _try_transform,
    "losses": _try_loss,
}


def _joined(problem: str) -> str:
    """A task's problem names one of its options (`length: got 0; ...`), or a file."""
    return f".{problem}" if re.match(r"[a-z_]+: ", problem) else f": {problem}"
