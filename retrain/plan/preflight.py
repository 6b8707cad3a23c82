"""The last look before anything is created: what tasks are like, and what backends say of the runs."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from retrain import registry
from retrain.errors import ConfigError
from retrain.plan.matrix import Plan, RunPlan

if TYPE_CHECKING:
    from retrain.config.schema import Config
    from retrain.tasks import Task


@dataclass(frozen=True)
class TaskFacts:
    """What planning wants to know of a condition's task."""

    train_prompts: int
    held_out_prompts: int
    longest_answer: int


def preflight(plan: Plan, source: str) -> dict[str, TaskFacts]:
    """Build each distinct task, and ask backends about the runs.

    Returns:
        Facts of each condition's task.

    Raises:
        ConfigError: every problem found.
    """
    facts: dict[str, TaskFacts] = {}
    problems: dict[str, None] = {}
    built: dict[str, Task] = {}
    for run in {run.condition: run for run in plan.runs}.values():  # a seed changes nothing here
        data = run.config.data
        key = json.dumps([data.task, data.options, data.seed], default=str, sort_keys=True)
        task = built[key] = built.get(key) or _task(run)
        facts[run.condition] = TaskFacts(len(task.train), len(task.held_out), task.longest_answer)
        found = _backend_problems(replace(run.config, campaign=plan.campaign), task)
        problems.update(dict.fromkeys(f"{source} {problem}" for problem in found))
    if problems:
        raise ConfigError(list(problems))
    return facts


def _task(run: RunPlan) -> Task:
    data = run.config.data
    task: Task = registry.find("tasks", data.task)(seed=data.seed, **data.options)
    return task


def _backend_problems(config: Config, task: Task) -> list[str]:
    """Ask the backend, as far as it has an opinion: of prompts only if nothing else is wrong."""
    name = config.backend.backend
    check_run = registry.optional("backends", name, "check_run")
    problems = list(check_run(config)) if check_run else []
    check_prompts = registry.optional("backends", name, "check_prompts")
    return problems or (list(check_prompts(config, [*task.train, *task.held_out])) if check_prompts else [])
