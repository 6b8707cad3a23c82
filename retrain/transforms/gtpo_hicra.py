"""GTPO, then more credit for planning tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from retrain.registry import NotNegative
from retrain.rollouts import Floats, Rollout
from retrain.transforms import gtpo
from retrain.transforms.planning import PHRASES, planning_mask


def reweigh(
    rollout: Rollout,
    advantage: float,
    progress: float,
    *,
    alpha: NotNegative = 0.2,
    beta: NotNegative = 0.1,
    planning_phrases: Sequence[str] = PHRASES,
) -> Floats:
    """Weigh as `gtpo` does, then give planning tokens A + alpha |A|.

    Amplifies the reward of a planning token and dampens its penalty, which keeps exploring plans.

    Args:
        alpha: extra credit of planning tokens, 0 or more; above 1, penalties become rewards.
        beta: as in `gtpo`.
        planning_phrases: phrases that mark planning tokens; whole words, any case.

    Source: hierarchy-aware credit assignment (HICRA), arXiv:2509.03646.
    """
    if not (math.isfinite(alpha) and alpha >= 0):
        raise ValueError(f"alpha: got {alpha}; needs a number of 0 or more")
    weighted = gtpo.reweigh(rollout, advantage, progress, beta=beta)
    planning = planning_mask(rollout, planning_phrases)
    return np.where(planning, weighted + alpha * np.abs(weighted), weighted)
