"""GTPO: surprising tokens get more of the rollout's advantage."""

from __future__ import annotations

from retrain.base.registry import NotNegative
from retrain.base.rollouts import Floats, Rollout


def reweigh(rollout: Rollout, advantage: float, progress: float, *, beta: NotNegative = 0.1) -> Floats:
    """Weigh the advantage by surprisal: A max(0, 1 + beta (u / mean(u) - 1)), u = -log p.

    p is the sampler's probability of the token and mean(u) the mean over the rollout's tokens, so the weights
    average 1 unless the floor of 0 applies (never for beta <= 1).

    Args:
        beta: strength of the weighting, 0 or more; 0 is none.

    Returns:
        A rollout without any surprisal keeps its advantage on every token.

    Source: after the entropy-weighted token rewards of GTPO, arXiv:2508.04349, with the surprisal of the
        sampled token in place of the entropy, which samplers do not always report.
    """
    return float(advantage) * weights(surprisal(rollout), beta)


def surprisal(rollout: Rollout) -> Floats:
    """Return u for each token: shape (tokens,), nats, none negative."""
    import numpy as np  # not at the top, as in `weights`: `explain` imports this file and computes nothing

    # rounding by the sampler may put log p slightly above 0
    return np.maximum(-rollout.logprobs, 0.0)


def weights(u: Floats, beta: float) -> Floats:
    """Return max(0, 1 + beta (u / mean(u) - 1)) per token; ones if all surprisal is 0."""
    import numpy as np

    mean = u.mean() if u.size else 0.0
    if mean <= 0:
        return np.ones_like(u)
    return np.maximum(0.0, 1.0 + beta * (u / mean - 1.0))
