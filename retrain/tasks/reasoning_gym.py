"""Problems that the package reasoning-gym generates: algebra, logic, games, graphs and more.

Source: Reasoning Gym, arXiv:2505.24760.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from retrain.errors import ConfigError
from retrain.extras import load
from retrain.registry import nearest
from retrain.rollouts import Prompt
from retrain.tasks import Task
from retrain.tasks.generated import MAX_COUNT, check, whole_number_problem
from retrain.tasks.rows import PLACEHOLDER, Fields, Row, option_problems, read_prompts, split_by_fraction

EXTRA = "reasoning-gym"
PACKAGES = ("reasoning_gym",)
ANSWERS = ("text", "entry")


def build(
    *,
    dataset: str = "",
    config: Mapping[str, Any] | None = None,
    count: int = 1000,
    answers: str = "text",
    template: str = PLACEHOLDER,
    held_out: float = 0.1,
    seed: int,
) -> Task:
    """Generate the problems and split them by prompt text.

    Args:
        dataset: reasoning-gym's name of a generator, such as "leg_counting".
        config: table of the generator's own settings.
        count: problems to generate, the held-out ones included.
        answers: "text": the answer is one right answer as text, for `match` and others. "entry": it
            names the whole entry, for `reward = "reasoning_gym"`, which knows every right answer.
        template: what the policy is shown, {prompt} being the question.
        held_out: fraction of the distinct prompts that training never sees.
        seed: decides the problems, their order and the split.

    Raises:
        ConfigError: the package is not installed, it has no such generator, or an option is wrong.
    """
    fields = Fields("question", "answer" if answers == "text" else "", template)  # many have several, or none
    problems = option_problems(fields, held_out, dataset=dataset)
    problems += whole_number_problem("count", count, 1, MAX_COUNT)
    if answers not in ANSWERS:
        problems.append(f"answers: got {answers!r}; needs one of {', '.join(ANSWERS)}")
    check(problems)
    spec = {**(config or {}), "seed": seed, "size": count}
    entries = list(_generator(dataset, spec))
    rows = (Row(i, f"{dataset} entry {i}", entry) for i, entry in enumerate(entries, start=1))
    task = split_by_fraction(read_prompts(rows, fields, dataset), held_out, seed)
    return task if answers == "text" else _pointing(task, {"dataset": dataset, "config": spec})


def _generator(dataset: str, spec: Mapping[str, Any]) -> Any:
    library = load("reasoning_gym", EXTRA, "reasoning_gym")
    known = list(library.factory.DATASETS)
    if dataset not in known:
        near = nearest(dataset, known)
        hint = f"did you mean {near!r}?" if near else f"there are {len(known)}, such as {known[0]!r}"
        raise ConfigError(f"dataset: reasoning-gym has no {dataset!r}; {hint}")
    try:
        return library.create_dataset(dataset, **spec)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"config: {dataset!r} refuses its settings: {error}") from error


def _pointing(task: Task, source: Mapping[str, Any]) -> Task:
    """Return the task with answers that name their entry, from which the reward generates it again."""

    def pointed(prompt: Prompt) -> Prompt:
        return replace(prompt, answer=json.dumps({**source, "index": prompt.id - 1}))

    return replace(task, train=tuple(map(pointed, task.train)), held_out=tuple(map(pointed, task.held_out)))
