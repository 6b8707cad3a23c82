"""Add two whole numbers: `27+5=` -> `32`."""

from __future__ import annotations

from retrain.plugins.tasks import Task
from retrain.plugins.tasks.generated import DIGITS, check_options, generate, in_base


def build(*, digits: int = 1, base: int = 10, count: int = 0, held_out: float = 0.1, seed: int) -> Task:
    """Build the task; `digits` is the most of a summand, 1 to 64; see `task_of_symbols`."""
    check_options(digits=digits, base=base, count=count, held_out=held_out)

    def write(number: int) -> tuple[str, str]:
        left, right = divmod(number, base**digits)
        return f"{in_base(left, base)}+{in_base(right, base)}=", in_base(left + right, base)

    alphabet = DIGITS[:base] + "+="
    return generate(base ** (2 * digits), write, alphabet=alphabet, count=count, held_out=held_out, seed=seed)
