"""Builds the task of a run: the one that `[data]` names, or several sources as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any

from retrain.base import registry
from retrain.config.resolve import by_source
from retrain.config.schema import Config
from retrain.plugins.tasks import Task

Build = Callable[[str, Mapping[str, Any], int], Task]  # name, options, seed


def build_task(name: str, options: Mapping[str, Any], seed: int) -> Task:
    """Build the task of this name."""
    task: Task = registry.check_made("tasks", name, registry.find_plugin("tasks", name)(seed=seed, **options))
    return task


def task_of(config: Config, build: Build = build_task) -> Task:
    """Build what a run is trained on and evaluated with.

    Several sources are one task, whose prompts name theirs and have ids that are unique in the run. Held-out
    prompts come from each source in turn, so that the first ones are of all.

    Raises:
        ConfigError: a task rejects its options.
    """
    if not config.data.source:
        return build(config.data.task, config.data.options, config.data.seed)
    tasks: list[Task] = []
    after = 0  # number of ids that are taken
    for name, own in by_source(config).items():
        task = build(own.data.task, own.data.options, own.data.seed)
        train, held_out = (
            tuple(replace(prompt, id=after + prompt.id, source=name) for prompt in prompts)
            for prompts in (task.train, task.held_out)
        )
        tasks.append(replace(task, train=train, held_out=held_out))
        after = 1 + max((prompt.id for prompt in chain(train, held_out)), default=after - 1)
    in_turn = zip_longest(*(task.held_out for task in tasks))
    return Task(
        tuple(chain.from_iterable(task.train for task in tasks)),
        tuple(prompt for prompts in in_turn for prompt in prompts if prompt is not None),
        "".join(sorted(set().union(*(task.alphabet for task in tasks)))),
        max(task.longest_answer for task in tasks),
    )
