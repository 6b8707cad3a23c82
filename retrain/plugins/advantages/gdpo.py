"""GDPO: each part of a reward is normalised within its group, so that none drowns the others."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from retrain.base.registry import Positive
from retrain.base.rollouts import Floats
from retrain.plugins.advantages import over_batch
from retrain.plugins.advantages.grpo import ROUNDING


@over_batch
def estimate(
    rewards: Floats, *, parts: Mapping[str, Floats], weights: Mapping[str, float], eps: Positive = 1e-4
) -> Floats:
    """Normalise each part within its group, add them up by their weights, and divide by the batch's spread.

    The sum over a group is 0, and so is the mean of the batch that the paper subtracts: without that, a group
    whose parts all tie gets exact zeros. One that ties in its reward, but not in the parts, has a signal.

    Args:
        rewards: NaN where a rollout was not scored.
        parts: NaN where one was not scored; it is left out of its group's mean and spread, and adds nothing.
        weights: of the parts that count.
        eps: added to each deviation, which bounds what a part that hardly varies counts.

    Returns:
        Mean 0 over each group, and standard deviation 1 over the scored rollouts of the batch, up to `eps`.

    Source: GDPO, arXiv:2601.05242; deviations and `eps` as in TRL's `normalize_then_sum`.
    """
    scored = ~np.isnan(rewards)
    total = np.zeros(scored.shape)
    for name, weight in weights.items():
        part = np.where(scored, parts[name], np.nan)
        known = ~np.isnan(part)
        values, counts = np.where(known, part, 0.0), known.sum(axis=1, keepdims=True)
        mean = values.sum(axis=1, keepdims=True) / np.maximum(counts, 1)
        centre = np.where(known, part - mean, 0.0)
        largest, spread = (np.abs(each).max(axis=1, keepdims=True) for each in (values, centre))
        centre = np.where(spread <= ROUNDING * largest, 0.0, centre)  # equal in its group
        deviation = np.sqrt(np.square(centre).sum(axis=1, keepdims=True) / np.maximum(counts - 1, 1))
        total += weight * centre / (deviation + eps)
    of_batch = total[scored].std(ddof=1) if scored.sum() > 1 else 0.0
    return total / (of_batch + eps)
