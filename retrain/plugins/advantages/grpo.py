"""GRPO: a rollout's reward against the mean of its group; other estimators centre rewards as it does."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrain.base.rollouts import Floats

ROUNDING = 1e-12  # relative; 0.1 + 0.2 is not 0.3, and such a deviation would become a divisor


def estimate(rewards: Floats, *, scale: bool = False) -> Floats:
    """Centre rewards within each prompt's group of rollouts: r - mean.

    A group whose rewards are all equal gets exact zeros.

    Args:
        scale: also divide by the group's standard deviation (population), which leaves no unit.

    Source: GRPO, arXiv:2402.03300; unscaled as in Dr. GRPO, arXiv:2503.20783.
    """
    centre = centred(rewards)
    if not scale:
        return centre
    deviation = np.where(tied(rewards), 1.0, rewards.std(axis=1, keepdims=True))
    return centre / deviation


def centred(rewards: Floats) -> Floats:
    """Subtract each group's mean; a group of equal rewards gets exact zeros."""
    zeros: Floats = np.zeros_like(rewards)
    return np.where(tied(rewards), zeros, rewards - rewards.mean(axis=1, keepdims=True))


def tied(rewards: Floats) -> NDArray[np.bool_]:
    """Which groups have equal rewards only, up to rounding: shape (prompts, 1)."""
    largest = np.abs(rewards).max(axis=1, keepdims=True)
    equal: NDArray[np.bool_] = np.ptp(rewards, axis=1, keepdims=True) <= ROUNDING * largest
    return equal
