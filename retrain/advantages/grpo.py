"""GRPO: a rollout's reward against the mean of its group."""

from __future__ import annotations

import numpy as np

from retrain.advantages.groups import centred, checked, tied
from retrain.rollouts import Floats


def estimate(rewards: Floats, *, scale: bool = False) -> Floats:
    """Centre rewards within each prompt's group of rollouts: r - mean.

    A group whose rewards are all equal gets exact zeros.

    Args:
        scale: also divide by the group's standard deviation (population), which leaves no unit.

    Source: GRPO, arXiv:2402.03300; unscaled as in Dr. GRPO, arXiv:2503.20783.
    """
    values = checked(rewards)
    centre = centred(values)
    if not scale:
        return centre
    deviation = np.where(tied(values), 1.0, values.std(axis=1, keepdims=True))
    return centre / deviation
