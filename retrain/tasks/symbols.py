"""Tasks on a row of symbols: the prompt is the row and "=", the answer a rearrangement of it."""

from __future__ import annotations

from collections.abc import Callable

from retrain.tasks import Task
from retrain.tasks.generated import (
    DIGITS,
    MAX_COUNT,
    MAX_LENGTH,
    check,
    generate,
    held_out_problem,
    in_base,
    whole_number_problem,
)


def symbol_task(
    answer: Callable[[str], str], *, length: int, base: int, count: int, held_out: float, seed: int
) -> Task:
    """Return a task whose prompts are rows of `length` symbols out of `base`."""
    check(
        whole_number_problem("length", length, 1, MAX_LENGTH)
        + whole_number_problem("base", base, 2, len(DIGITS))
        + whole_number_problem("count", count, 0, MAX_COUNT)
        + held_out_problem(held_out)
    )

    def write(number: int) -> tuple[str, str]:
        row = in_base(number, base, length)
        return row + "=", answer(row)

    return generate(
        base**length, write, alphabet=DIGITS[:base] + "=", count=count, held_out=held_out, seed=seed
    )
