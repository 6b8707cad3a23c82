"""Numbered prompts, for environments that bring their own problems: a number chooses the problem.

The text of a prompt is its number, and there is no answer to compare with.
"""

from __future__ import annotations

import string

from retrain.plugins.tasks import Task
from retrain.plugins.tasks.generated import MAX_COUNT, check, generate, held_out_problem, range_problem

WRITTEN = "\n" + string.printable[:95]  # ASCII, for backends that read characters


def build(*, count: int = 1000, held_out: float = 0.1, alphabet: str = WRITTEN, seed: int) -> Task:
    """Build the task.

    Args:
        count: prompts, numbered from 0, including held-out ones.
        held_out: fraction of the prompts that training never sees.
        alphabet: further characters that the environment or the policy writes.
        seed: decides the order and the split.
    """
    check(range_problem("count", count, 1, MAX_COUNT) + held_out_problem(held_out))

    def write(number: int) -> tuple[str, str]:
        return str(number), ""

    letters = string.digits + alphabet
    return generate(count, write, alphabet=letters, count=count, held_out=held_out, seed=seed)
