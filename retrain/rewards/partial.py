"""Partial credit for the characters of an answer that are right and in their place."""

from __future__ import annotations

import math

from retrain.registry import Positive
from retrain.rollouts import Prompt

RANGE = (0.0, 1.0)


def score(completion: str, prompt: Prompt, *, power: Positive = 2.0) -> float:
    """Return the fraction of positions at which the stripped completion and answer agree, to a power.

    The share is of the longer text of the two, so that rambling on costs as much as stopping
    short, and only the answer itself gets 1.

    Args:
        completion: what the policy wrote.
        prompt: holds the answer.
        power: 1 pays by the place; above 1, chance hits are worth next to nothing and the last
            place pays most.

    Raises:
        ValueError: `power` is not a number above 0.
    """
    if isinstance(power, bool) or not isinstance(power, int | float) or not 0 < power < math.inf:
        raise ValueError(f"power: got {power!r}; needs a number above 0, such as 2.0")
    given, wanted = completion.strip(), prompt.answer.strip()
    if given == wanted:
        return 1.0
    agreeing = sum(a == b for a, b in zip(given, wanted, strict=False))
    return math.pow(agreeing / max(len(given), len(wanted)), power)
