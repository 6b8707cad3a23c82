"""Count one up: `39=` -> `40`."""

from __future__ import annotations

from retrain.plugins.tasks import Task
from retrain.plugins.tasks.generated import DIGITS, check_options, generate, in_base


def build(*, digits: int = 2, base: int = 10, count: int = 0, held_out: float = 0.1, seed: int) -> Task:
    """Build the task; `digits` is the most of the prompt's number, 1 to 64; see `task_of_symbols`."""
    check_options(digits=digits, base=base, count=count, held_out=held_out)

    def write(number: int) -> tuple[str, str]:
        return in_base(number, base) + "=", in_base(number + 1, base)

    alphabet = DIGITS[:base] + "="
    return generate(base**digits, write, alphabet=alphabet, count=count, held_out=held_out, seed=seed)
