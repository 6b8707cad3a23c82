"""GTPO: surprising tokens get more of the rollout's advantage."""

from __future__ import annotations

from retrain.registry import NotNegative
from retrain.rollouts import Floats, Rollout
from retrain.transforms.surprisal import surprisal, weights


def reweigh(rollout: Rollout, advantage: float, progress: float, *, beta: NotNegative = 0.1) -> Floats:
    """Weigh the advantage by surprisal: A max(0, 1 + beta (u / mean(u) - 1)), u = -log p.

    p is the sampler's probability of the token and mean(u) the mean over the rollout's tokens, so the weights
    average 1 unless the floor of 0 applies (never for beta <= 1).

    Args:
        beta: strength of the weighting, 0 or more; 0 is none.

    Returns:
        Shape (tokens,). A rollout without any surprisal keeps its advantage on every token.

    Raises:
        ValueError: `beta` is negative or not finite, or a log-probability is not finite.

    Source: after the entropy-weighted token rewards of GTPO, arXiv:2508.04349, with the surprisal of the
        sampled token in place of the entropy, which samplers do not always report.
    """
    return float(advantage) * weights(surprisal(rollout), beta)
