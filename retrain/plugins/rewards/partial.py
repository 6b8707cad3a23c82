"""Partial credit for the characters of an answer that are correct and in the right position."""

from __future__ import annotations

import math

from retrain.base.registry import Positive
from retrain.base.rollouts import Prompt

RANGE = (0.0, 1.0)
PURE = True


def score(completion: str, prompt: Prompt, *, power: Positive = 2.0) -> float:
    """Return the fraction of matching positions in stripped completion and answer, raised to a power.

    The fraction is relative to the longer text, so that extra text costs as much as missing text, and
    only the exact answer gets 1.

    Args:
        completion: text of the completion.
        prompt: holds the answer.
        power: 1 rewards every position equally; above 1, chance matches earn almost nothing and the
            last position earns most.
    """
    text, reference = completion.strip(), prompt.answer.strip()
    if text == reference:
        return 1.0
    agreeing = sum(a == b for a, b in zip(text, reference, strict=False))
    return math.pow(agreeing / max(len(text), len(reference)), power)
