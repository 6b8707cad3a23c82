"""Learning-rate schedules over progress: steps at the initial batch that the steps so far were worth."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def schedule_factor(schedule: Schedule, progress: float, total: float, warmup: float = 0.0) -> float:
    """Return the factor of the learning rate, in [0, 1].

    Args:
        schedule: constant, or falling to zero at `total` along a line or half a cosine.
        progress: of all steps before this one; the first step's is 0.
        total: progress at which a falling schedule reaches zero.
        warmup: progress over which the factor rises; the first step already moves.
    """
    rise = min(1.0, (progress + 1.0) / warmup) if warmup > 0 else 1.0
    done = min(1.0, progress / total)
    if schedule == "linear":
        return rise * (1.0 - done)
    if schedule == "cosine":
        return rise * 0.5 * (1.0 + math.cos(math.pi * done))
    return rise
