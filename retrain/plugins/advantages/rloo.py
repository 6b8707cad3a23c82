"""RLOO: a rollout's reward against the mean of the others in its group."""

from __future__ import annotations

from retrain.base.rollouts import Floats
from retrain.plugins.advantages.grpo import centred


def estimate(rewards: Floats) -> Floats:
    """Subtract from each reward the mean of its group's other rewards.

    With n rollouts this is n / (n - 1) times the centred reward. It is unbiased, since the baseline excludes
    the rollout's own reward.

    Source: REINFORCE leave-one-out, arXiv:2402.14740.
    """
    rollouts = rewards.shape[1]
    advantages: Floats = centred(rewards) * (rollouts / (rollouts - 1))
    return advantages
