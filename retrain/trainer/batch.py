"""Rewards -> advantages -> token advantages -> weighted training samples.

Groups whose advantages are all zero teach nothing: they are counted, and left out of the loss and
of its denominator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from retrain import registry
from retrain.config.schema import Config
from retrain.errors import RunFailedError
from retrain.rollouts import Floats, Group, Loss, Rollout, TrainingSample

CORRECT = 1.0 - 1e-9  # a reward of 1, up to rounding


@dataclass(frozen=True, slots=True, eq=False)
class ScoredBatch:
    """A step's groups with their rewards, shape (prompts, rollouts)."""

    groups: Sequence[Group]
    rewards: Floats

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts, group after group."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def tokens(self) -> int:
        """Sampled tokens, informative or not."""
        return sum(len(rollout.tokens) for rollout in self.rollouts)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The plugins of a run with their parameters bound."""

    score: Callable[..., float]
    estimate: Callable[[Floats], Floats]
    reweigh: Callable[[Rollout, float, float], Floats]
    loss: Loss
    normalization: str
    max_tokens: int

    @classmethod
    def of(cls, config: Config) -> Algorithm:
        """Find the plugins that a configuration names."""
        table = config.algorithm
        evaluate = registry.find("losses", table.loss_mode)
        return cls(
            score=partial(registry.find("rewards", config.reward.reward), **config.reward.params),
            estimate=partial(registry.find("advantages", table.advantage_mode), **table.advantage_params),
            reweigh=partial(registry.find("transforms", table.transform_mode), **table.transform_params),
            loss=Loss(table.loss_mode, partial(evaluate, **table.loss_params), table.loss_params),
            normalization=table.loss_normalization,
            max_tokens=config.training.max_tokens,
        )

    def reward(self, groups: Sequence[Group]) -> ScoredBatch:
        """Score every rollout.

        Raises:
            RunFailedError: a reward is not a finite number.
        """
        return ScoredBatch(
            groups, np.array([[self._score(r) for r in g.rollouts] for g in groups], dtype=float)
        )

    def samples(self, batch: ScoredBatch, progress: float) -> list[TrainingSample]:
        """Give the rollouts of informative groups, their tokens' weights adding up to the normalised loss."""
        advantages = self.estimate(batch.rewards)
        informative = np.flatnonzero(np.any(advantages != 0, axis=1)).tolist()
        chosen = [
            (rollout, float(advantages[g, i]), number)
            for number, g in enumerate(informative)
            for i, rollout in enumerate(batch.groups[g].rollouts)
            if rollout.tokens
        ]
        weigh = self._weights([rollout for rollout, _, _ in chosen])
        return [
            TrainingSample(rollout, self.reweigh(rollout, advantage, progress), weigh(rollout), group)
            for rollout, advantage, group in chosen
        ]

    def _score(self, rollout: Rollout) -> float:
        reward = float(self.score(rollout.text, rollout.prompt))
        if not math.isfinite(reward):
            raise RunFailedError(
                f"the reward of prompt {rollout.prompt.id} is {reward}; a reward must be a finite number"
            )
        return reward

    def _weights(self, rollouts: Sequence[Rollout]) -> Callable[[Rollout], float]:
        if self.normalization == "token":
            tokens = sum(len(r.tokens) for r in rollouts)
            return lambda rollout: 1.0 / tokens
        if self.normalization == "sequence":
            return lambda rollout: 1.0 / (len(rollouts) * len(rollout.tokens))
        return lambda rollout: 1.0 / (len(rollouts) * self.max_tokens)
