"""Learning-rate schedules over progress: steps so far, in equivalent steps at the initial batch."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def schedule_factor(schedule: Schedule, progress: float, total: float, warmup: float = 0.0) -> float:
    """Return the factor of the learning rate, in [0, 1].

    Args:
        schedule: constant, or decaying to zero at `total`, linearly or as half a cosine.
        progress: of all earlier steps; 0 for the first step.
        total: progress at which a decaying schedule reaches zero.
        warmup: progress over which the factor rises; above 0 from the first step.
    """
    rise = min(1.0, (progress + 1.0) / warmup) if warmup > 0 else 1.0
    done = min(1.0, progress / total)
    if schedule == "linear":
        return rise * (1.0 - done)
    if schedule == "cosine":
        return rise * 0.5 * (1.0 + math.cos(math.pi * done))
    return rise
