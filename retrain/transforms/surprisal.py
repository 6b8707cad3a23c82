"""Token weights from surprisal u = -log p (nats, under the sampling policy)."""

from __future__ import annotations

import math

import numpy as np

from retrain.rollouts import Floats, Rollout


def surprisal(rollout: Rollout) -> Floats:
    """Return u for each token: shape (tokens,), nats, none negative.

    Raises:
        ValueError: a log-probability is not finite.
    """
    logprobs = np.asarray(rollout.logprobs, dtype=np.float64)
    if not np.isfinite(logprobs).all():
        token = int(np.argmin(np.isfinite(logprobs)))
        raise ValueError(f"rollout.logprobs: got {logprobs[token]} at token {token}; needs finite numbers")
    # rounding by the sampler may put log p slightly above 0
    return np.maximum(-logprobs, 0.0)


def weights(u: Floats, beta: float) -> Floats:
    """Return max(0, 1 + beta (u / mean(u) - 1)) per token; ones if all surprisal is 0.

    Raises:
        ValueError: `beta` is negative or not finite.
    """
    if not (math.isfinite(beta) and beta >= 0):
        raise ValueError(f"beta: got {beta}; needs a number of 0 or more")
    mean = u.mean() if u.size else 0.0
    if mean <= 0:
        return np.ones_like(u)
    return np.maximum(0.0, 1.0 + beta * (u / mean - 1.0))
