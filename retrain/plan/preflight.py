"""The last look before anything is created: what tasks are like, and whether rollouts can flow."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from retrain import registry
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
    """Build each distinct task, ask backends about the run, and refuse a rate limiter that could deadlock.

    Returns:
        Facts of each condition's task.

    Raises:
        ConfigError: every problem found.
    """
    facts: dict[str, TaskFacts] = {}
    problems: dict[str, None] = {}
    built: dict[str, TaskFacts] = {}
    for run in {run.condition: run for run in plan.runs}.values():  # a seed changes nothing here
        data = run.config.data
        key = json.dumps([data.task, data.options, data.seed], default=str, sort_keys=True)
        facts[run.condition] = built[key] = built.get(key) or _task_facts(run)
        check = registry.optional("backends", run.config.backend.backend, "check_run")
        problems.update(dict.fromkeys(f"{source} {p}" for p in (check(run.config) if check else ())))
        if run.config.rate_limiter.max_staleness and _is_microbatch(run):
            what = "samples beside training in units of their own size"
            problems[
                f'{source} [backpressure].control: "microbatch" cannot change what runs at a time where '
                f'[rate_limiter] {what}; use control = "batch" or max_staleness = 0'
            ] = None
        flow = flow_settings(run.config)
        problems.update(
            dict.fromkeys(f"{source} [rate_limiter].{p}" for p in (flow.problems() if flow else ()))
        )
    if problems:
        raise ConfigError(list(problems))
    return facts


def _is_microbatch(run: RunPlan) -> bool:
    return run.config.backpressure.enabled and run.config.backpressure.control == "microbatch"


def _task_facts(run: RunPlan) -> TaskFacts:
    data = run.config.data
    task: Task = registry.find("tasks", data.task)(seed=data.seed, **data.options)
    return TaskFacts(len(task.train), len(task.held_out), task.longest_answer)
