"""Option checks shared by tasks on whole numbers."""

from __future__ import annotations

from retrain.tasks.generated import (
    DIGITS,
    MAX_COUNT,
    MAX_LENGTH,
    check,
    held_out_problem,
    whole_number_problem,
)


def check_arithmetic(*, digits: int, base: int, count: int, held_out: float) -> None:
    """Raise one ConfigError for all options out of range."""
    check(
        whole_number_problem("digits", digits, 1, MAX_LENGTH)
        + whole_number_problem("base", base, 2, len(DIGITS))
        + whole_number_problem("count", count, 0, MAX_COUNT)
        + held_out_problem(held_out)
    )
