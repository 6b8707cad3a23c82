"""REINFORCE++: advantages normalised over the whole batch instead of each group."""

from __future__ import annotations

from typing import Literal

import numpy as np

from retrain.advantages._groups import centred, checked
from retrain.rollouts import Floats


def estimate(rewards: Floats, *, baseline: Literal["batch", "group"] = "batch") -> Floats:
    """Subtract a baseline, then divide by the standard deviation over the whole batch.

    Args:
        rewards: shape (prompts, rollouts), any unit.
        baseline: "batch" (the paper's REINFORCE++) subtracts the batch's mean, so that easy
            prompts are reinforced on the whole and a group of equal rewards still carries
            signal; "group" (its REINFORCE++-baseline, for several rollouts per prompt)
            subtracts each group's mean.

    Returns:
        Shape (prompts, rollouts), without unit: mean 0 and standard deviation 1 over the
        batch, or exact zeros where nothing differs.

    Raises:
        ValueError: an unknown baseline, a reward that is not finite, or too few rollouts: two
            per group for "group", two in all for "batch".

    Source: REINFORCE++, arXiv:2501.03262.
    """
    if baseline == "group":
        centre = centred(checked(rewards))
    elif baseline == "batch":
        values = checked(rewards, least_rollouts=1)
        centre = centred(_at_least_two(values).reshape(1, -1)).reshape(values.shape)
    else:
        raise ValueError(f"baseline: got {baseline!r}; needs 'batch' or 'group'")
    deviation = centre.std()
    return centre / deviation if deviation > 0 else centre


def _at_least_two(values: Floats) -> Floats:
    if values.size < 2:
        raise ValueError(
            f"rewards: got {np.size(values)} rollout(s); needs at least 2 in the batch to have a baseline"
        )
    return values
