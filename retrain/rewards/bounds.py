"""Refuses a reward that its plugin cannot have given: what scores a policy's text may be led astray by it.

A plugin whose rewards have bounds says so by a constant beside its `score`: `RANGE = (0.0, 1.0)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from retrain import registry
from retrain.errors import ConfigError
from retrain.rewards import Outcome, Score
from retrain.rewards.limits import is_number

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Bounds:
    """The rewards that a plugin gives, both ends included."""

    reward: str  # its name
    low: float = field(default=-math.inf)
    high: float = field(default=math.inf)

    @property
    def is_bounded(self) -> bool:
        """Whether anything but a finite number is known of them."""
        return self.low > -math.inf or self.high < math.inf

    def keep(self, scores: Iterable[Score]) -> list[Score]:
        """Return the scores, those out of bounds (or NaN) as errors without a value."""
        return [self._kept(score) for score in scores] if self.is_bounded else list(scores)

    def _kept(self, score: Score) -> Score:
        if score.value is None or self.low - ROUNDING <= score.value <= self.high + ROUNDING:
            return score
        what = (
            f"the reward {self.reward!r} gave {score.value:g}, and gives {self.low:g} to {self.high:g} only"
        )
        return Score(None, Outcome.ERROR, what)


def bounds_of(name: str) -> Bounds:
    """Return what a plugin declares.

    Raises:
        ConfigError: no such plugin, or its RANGE is not two numbers in order.
    """
    declared = registry.plugin("rewards", name).constant("RANGE", None)
    if declared is None:
        return Bounds(name)
    if not (isinstance(declared, tuple) and len(declared) == 2 and all(map(is_number, declared))):
        raise ConfigError(f"{name!r}: RANGE is {declared!r}; needs the lowest and the highest reward")
    low, high = map(float, declared)
    if low >= high:
        raise ConfigError(f"{name!r}: RANGE is {declared!r}; needs the lowest reward first")
    return Bounds(name, low, high)
