"""MaxRL: centred rewards over the group's mean, so that hard prompts weigh more."""

from __future__ import annotations

import numpy as np

from retrain.base.registry import Positive
from retrain.base.rollouts import Floats
from retrain.plugins.advantages.grpo import centred


def estimate(rewards: Floats, *, eps: Positive = 1e-6) -> Floats:
    """Centre rewards within each group and divide by the group's mean: (r - mean) / (mean + eps).

    With rewards of 0 and 1 the mean is the group's success rate: the fewer rollouts succeed, the more each
    success counts, as in maximum likelihood.

    Args:
        rewards: none negative: a negative mean would flip the signs of the advantages.
        eps: a group whose mean is at most this has no success to learn from and gets zeros.

    Source: maximum likelihood reinforcement learning, arXiv:2602.02710.
    """
    if rewards.size and rewards.min() < 0:
        raise ValueError(
            f"rewards: got {rewards.min()}; maxrl divides by the group's mean and needs rewards of 0 or "
            "more; shift the reward, or use advantage_mode 'grpo'"
        )
    mean = rewards.mean(axis=1, keepdims=True)
    return np.where(mean > eps, centred(rewards) / (mean + eps), 0.0)
