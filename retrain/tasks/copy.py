"""Copy a row of symbols: `372=` -> `372`."""

from __future__ import annotations

from retrain.tasks import Task
from retrain.tasks.symbols import symbol_task


def build(*, length: int = 3, base: int = 10, count: int = 0, held_out: float = 0.1, seed: int) -> Task:
    """Build the task.

    Args:
        length: symbols in a row, 1 to 64.
        base: distinct symbols, 2 to 36.
        count: distinct prompts, including held-out ones; 0 takes all, at most 1000.
        held_out: fraction of the prompts that training never sees.
        seed: decides which prompts are drawn, their order and the split.

    Raises:
        ConfigError: an option is out of range, or there are too few prompts for it.
    """
    return symbol_task(lambda row: row, length=length, base=base, count=count, held_out=held_out, seed=seed)
