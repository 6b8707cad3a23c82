"""REINFORCE++: advantages normalised over the whole batch instead of each group."""

from __future__ import annotations

from typing import Literal

import numpy as np

from retrain.base.rollouts import Floats
from retrain.plugins.advantages import over_batch
from retrain.plugins.advantages.grpo import centred


@over_batch
def estimate(rewards: Floats, *, baseline: Literal["batch", "group"] = "batch") -> Floats:
    """Subtract a baseline, then divide by the standard deviation over the whole batch.

    Args:
        rewards: NaN where a rollout was not scored.
        baseline: "batch" (the paper's REINFORCE++) subtracts the mean of the batch, so a group of equal
            rewards still carries signal; "group" (REINFORCE++-baseline, for several rollouts per prompt)
            subtracts the mean of each group.

    Returns:
        Mean 0 and standard deviation 1 over the scored rollouts of the batch, or exact zeros if all rewards
        are equal; 0 for unscored rollouts.

    Source: REINFORCE++, arXiv:2501.03262.
    """
    scored = ~np.isnan(rewards)
    centre: Floats = np.zeros_like(rewards)
    for peers in [slice(None)] if baseline == "batch" else range(len(rewards)):  # whose mean is the baseline
        if scored[peers].any():
            centre[peers][scored[peers]] = centred(rewards[peers][scored[peers]][None])[0]
    deviation = centre[scored].std() if scored.any() else 0.0
    return centre / deviation if deviation > 0 else centre
