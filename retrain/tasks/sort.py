"""Sort a row of digits: `372=` -> `237`."""

from __future__ import annotations

from retrain.tasks import Task
from retrain.tasks.generated import symbol_task


def build(*, length: int = 3, base: int = 10, count: int = 0, held_out: float = 0.1, seed: int) -> Task:
    """Build the task; `symbol_task` describes the options."""
    return symbol_task(
        lambda row: "".join(sorted(row)), length=length, base=base, count=count, held_out=held_out, seed=seed
    )
