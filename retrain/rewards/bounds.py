"""Rejects rewards outside their plugin's range, since a policy's text may exploit a scorer.

A plugin whose rewards have bounds declares them in a constant: `RANGE = (0.0, 1.0)`.
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
    """The range of a plugin's rewards, including both ends."""

    reward: str  # name of the plugin
    low: float = field(default=-math.inf)
    high: float = field(default=math.inf)

    @property
    def is_bounded(self) -> bool:
        """Whether the plugin declares a range."""
        return self.low > -math.inf or self.high < math.inf

    def keep(self, scores: Iterable[Score]) -> list[Score]:
        """Return the scores, with those out of bounds (or NaN) as errors without a value."""
        return [self._kept(score) for score in scores] if self.is_bounded else list(scores)

    def _kept(self, score: Score) -> Score:
        if score.value is None or self.low - ROUNDING <= score.value <= self.high + ROUNDING:
            return score
        declared = f"outside its range {self.low:g} to {self.high:g}"
        what = f"the reward {self.reward!r} returned {score.value:g}, {declared}"
        return Score(None, Outcome.ERROR, what)


def bounds_of(name: str) -> Bounds:
    """Return the range that a plugin declares.

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
