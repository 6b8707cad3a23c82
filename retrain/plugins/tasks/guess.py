"""Secret numbers for the environment `guess`: every prompt is `?`.

None is held out: a policy learns which secrets there are, and is right never to guess another.
"""

from __future__ import annotations

from dataclasses import replace

from retrain.plugins.tasks import Task
from retrain.plugins.tasks.generated import MAX_LENGTH, check, range_problem, task_of_symbols

SIGNS = "<=>?"
numbers = task_of_symbols(str)


def build(*, digits: int = 2, base: int = 10, count: int = 0, seed: int) -> Task:
    """Build the task; `digits` of a secret, 1 to 64, in a base of 2 to 10; see `task_of_symbols`."""
    check(range_problem("digits", digits, 1, MAX_LENGTH) + range_problem("base", base, 2, 10))
    task = numbers(length=digits, base=base, count=count, held_out=0.0, seed=seed)
    secrets = tuple(replace(prompt, text="?") for prompt in task.train)
    return Task(secrets, (), "".join(sorted({*task.alphabet, *SIGNS})), digits)
