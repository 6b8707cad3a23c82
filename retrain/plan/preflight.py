"""Checks before anything is created: tasks are built, and backends check the runs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from retrain import registry
from retrain.errors import ConfigError
from retrain.plan.matrix import Plan, RunPlan

if TYPE_CHECKING:
    from retrain.config.schema import Config
    from retrain.tasks import Task


def preflight(plan: Plan, source: str) -> dict[str, int]:
    """Build each distinct task, and check the runs with their backends.

    Returns:
        The length of the longest answer in each condition's task, in characters; 0 without answers.

    Raises:
        ConfigError: every problem found.
    """
    longest_answers: dict[str, int] = {}
    problems: dict[str, None] = {}
    built: dict[str, Task] = {}
    for run in {run.condition: run for run in plan.runs}.values():  # a seed changes nothing here
        data = run.config.data
        key = json.dumps([data.task, data.options, data.seed], default=str, sort_keys=True)
        task = built[key] = built.get(key) or _task(run)
        longest_answers[run.condition] = task.longest_answer
        found = _backend_problems(replace(run.config, campaign=plan.campaign), task)
        problems.update(dict.fromkeys(f"{source} {problem}" for problem in found))
    if problems:
        raise ConfigError(list(problems))
    return longest_answers


def _task(run: RunPlan) -> Task:
    data = run.config.data
    built = registry.find("tasks", data.task)(seed=data.seed, **data.options)
    task: Task = registry.check_made("tasks", data.task, built)
    return task


def _backend_problems(config: Config, task: Task) -> list[str]:
    """Return the backend's problems with a run; prompts are only checked if there are no others."""
    name = config.backend.backend
    check_run = registry.hook("backends", name, "check_run")
    if problems := list(check_run(config)) if check_run else []:
        return problems
    prompts = [*task.train, *task.held_out]
    check_prompts = registry.hook("backends", name, "check_prompts")
    check_alphabet = registry.hook("backends", name, "check_alphabet")
    return [
        *(check_prompts(config, prompts) if check_prompts else []),
        *(check_alphabet(config, prompts, task.alphabet) if check_alphabet else []),
    ]
