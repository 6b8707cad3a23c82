"""Count one up: `39=` -> `40`."""

from __future__ import annotations

from retrain.tasks import Task
from retrain.tasks.arithmetic import check_arithmetic
from retrain.tasks.generated import DIGITS, generate, in_base


def build(*, digits: int = 2, base: int = 10, count: int = 0, held_out: float = 0.1, seed: int) -> Task:
    """Build the task.

    Args:
        digits: most digits of the number in the prompt, 1 to 64.
        base: number base, 2 to 36.
        count: distinct prompts, including held-out ones; 0 takes all, at most 1000.
        held_out: fraction of the prompts that training never sees.
        seed: decides which prompts are drawn, their order and the split.

    Raises:
        ConfigError: an option is out of range, or there are too few prompts for it.
    """
    check_arithmetic(digits=digits, base=base, count=count, held_out=held_out)

    def write(number: int) -> tuple[str, str]:
        return in_base(number, base) + "=", in_base(number + 1, base)

    alphabet = DIGITS[:base] + "="
    return generate(base**digits, write, alphabet=alphabet, count=count, held_out=held_out, seed=seed)
