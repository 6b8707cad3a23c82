"""GTPO with the surprisal of execution tokens pooled, so that surprise in plans counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from retrain.base.registry import Fraction, NotNegative
from retrain.base.rollouts import Floats, Rollout
from retrain.plugins.transforms.gtpo import surprisal, weights
from retrain.plugins.transforms.gtpo_hicra import PHRASES, planning_mask


def reweigh(
    rollout: Rollout,
    advantage: float,
    progress: float,
    *,
    beta: NotNegative = 0.1,
    lambda_max: Fraction = 1.0,
    delay_fraction: Fraction = 0.1,
    ramp_fraction: Fraction = 0.5,
    planning_phrases: Sequence[str] = PHRASES,
) -> Floats:
    """Pull execution tokens' surprisal u towards its mean, then weigh as `gtpo` does.

    u' = lambda mean_exec(u) + (1 - lambda) u on execution tokens, which leaves mean(u) unchanged; planning
    tokens keep their u. lambda is 0 for the first `delay_fraction` of the run, then rises linearly over the
    next `ramp_fraction` to `lambda_max` and stays there: early in a run, execution is what is learned.

    Args:
        beta: as in `gtpo`.
        lambda_max: strength of pooling after the ramp, in [0, 1]; 1 is complete.
        delay_fraction: share of the run before the ramp, in [0, 1].
        ramp_fraction: share of the run for the ramp, in [0, 1]; 0 is a step.
        planning_phrases: phrases that mark planning tokens; whole words, any case.

    Source: selective entropy pooling with annealing (SEPA), teilo.xyz/posts/sepa.
    """
    strength = pooling(progress, lambda_max, delay_fraction, ramp_fraction)
    u = surprisal(rollout)
    execution = ~planning_mask(rollout, planning_phrases)
    if execution.any():
        u = np.where(execution, strength * u[execution].mean() + (1 - strength) * u, u)
    return float(advantage) * weights(u, beta)


def pooling(progress: float, lambda_max: float, delay_fraction: float, ramp_fraction: float) -> float:
    """Return lambda at this point of the run, in [0, lambda_max]."""
    if progress < delay_fraction:
        return 0.0
    if progress >= delay_fraction + ramp_fraction:
        return float(lambda_max)
    return float(lambda_max * (progress - delay_fraction) / ramp_fraction)
