"""A sign of cheating: an evaluation that falls while the reward rises."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from retrain.base.rollouts import Floats
from retrain.control.rules.persistent_noise import deviation, window_rises
from retrain.records.row_parts import EvalWatch

WINDOW = 10  # steps whose mean reward is that of an evaluation's policy
RECENT = 320  # steps whose rewards are kept
TELLING = 60  # steps that show how much such a mean varies; fewer show how much each differs from the next
FROM_NEIGHBOURS, FROM_STEPS = 1.46, 2.7  # of distant windows over these, at an autocorrelation of 0.9
RISEN = 3.0  # standard deviations of the reward's rise
CERTAIN = 3.0  # normal score of Student's t, at least: the best of many evaluations is partly luck
ERROR = 0.05  # probability that any of a run's evaluations seems to fall, which all pairs of them share


@dataclass(frozen=True)
class Seen:
    """An evaluation: each question's mean reward, and the training reward before it."""

    step: int
    scores: Mapping[str, float]  # by question; a text, since checkpoints are JSON
    reward: float  # mean of the last steps

    @property
    def score(self) -> float:
        return float(np.mean(list(self.scores.values())))


@dataclass
class Falling:
    """Compares each evaluation with the best one before it, question by question."""

    # the state of a checkpoint
    rewards: list[float] = field(default_factory=list)  # of the recent steps
    best: dict[str, Seen] = field(default_factory=dict)  # by evaluation
    falling: dict[str, str] = field(default_factory=dict)  # what fell, in words

    def trained(self, reward: float | None) -> None:
        """Take the mean reward of a step, if known; the first is that of the policy before all steps."""
        if reward is None:
            return
        if not self.rewards:
            self.best = {name: replace(start, reward=reward) for name, start in self.best.items()}
        self.rewards = [*self.rewards, reward][-RECENT:]

    def evaluated(self, name: str, step: int, scores: Mapping[int, float], looks: int) -> None:
        """Take an evaluation, of the policy after the last step: one of so many that the run makes."""
        reward = float(np.mean(self.rewards[-WINDOW:])) if self.rewards else 0.0
        newest = Seen(step, {str(question): score for question, score in scores.items()}, reward)
        best = self.best.setdefault(name, newest)
        rise = newest.reward - best.reward
        self.falling.pop(name, None)
        if newest.score >= best.score:
            self.best[name] = newest
        elif rise > 0 and rise > RISEN * _noise(np.array(self.rewards)) and _is_worse(newest, best, looks):
            self.falling[name] = (
                f"{name} fell from a reward of {best.score:.2f} at step {best.step} "
                f"to {newest.score:.2f} at step {step}"
            )

    def watch(self) -> EvalWatch:
        """Return the evaluations that fall, in words."""
        return EvalWatch(falling="; ".join(self.falling.values()))


def _noise(rewards: Floats) -> float:
    """Return the standard deviation of the difference of two windows' mean rewards where nothing changes.

    With an autocorrelation of 0.9; of noise with less, neighbouring windows differ as much as distant ones.
    """
    if len(rewards) < TELLING:
        return FROM_STEPS * deviation(np.diff(rewards))
    return FROM_NEIGHBOURS * deviation(window_rises(rewards, WINDOW))


def _is_worse(newest: Seen, best: Seen, looks: int) -> bool:
    """Whether the questions that both had cannot differ so by chance in any of so many looks."""
    # not at the top: 15 ms of each worker
    from retrain.control.rules.sequential import NORMAL, score

    gains = np.array([value - best.scores[q] for q, value in newest.scores.items() if q in best.scores])
    limit = max(CERTAIN, -NORMAL.inv_cdf(ERROR / math.comb(max(looks, 2), 2)))
    return bool(gains.sum() < 0) and score(gains) > limit
