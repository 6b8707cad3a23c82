"""No transform: every token of a rollout has the rollout's advantage."""

from __future__ import annotations

import numpy as np

from retrain.base.rollouts import Floats, Rollout


def reweigh(rollout: Rollout, advantage: float, progress: float) -> Floats:
    """Repeat the rollout's advantage for each token: shape (tokens,)."""
    return np.full(len(rollout.tokens), float(advantage))
