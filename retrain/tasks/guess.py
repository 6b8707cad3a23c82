"""Secret numbers for the environment `guess`: every prompt is `?`."""

from __future__ import annotations

from dataclasses import replace

from retrain.tasks import Task
from retrain.tasks.generated import symbol_task

SIGNS = "<=>?"


def build(*, digits: int = 2, base: int = 10, count: int = 0, held_out: float = 0.1, seed: int) -> Task:
    """Build the task; `digits` of a secret, 1 to 64; see `symbol_task`."""
    task = symbol_task(str, length=digits, base=base, count=count, held_out=held_out, seed=seed)
    train, held = (
        tuple(replace(prompt, text="?") for prompt in side) for side in (task.train, task.held_out)
    )
    return Task(train, held, "".join(sorted({*task.alphabet, *SIGNS})), digits)
