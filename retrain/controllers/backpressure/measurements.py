"""What was measured at each batch size: a running mean of log throughput that ages, and the noise.

Logs, because noise and gains of throughput are relative. Kept per size rather than in one window, so
that a long stay at one size does not push the exploration out of memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

WINDOW = 100.0  # a mean never counts more observations than this, so it follows a slow drift
KEPT_PER_STEP = 0.993  # other sizes' observations lose half their weight in 100 steps
NOISE_PRIOR = 0.15  # standard deviation of log throughput before anything was repeated
NOISE_PRIOR_COUNT = 6.0
NOISE_WINDOW = 60.0
NOISE_FLOOR = 0.01  # nothing real is quieter; below it every wiggle would look like a change
CLIP = 3.0  # standard deviations beyond which an observation counts as only so far off
FIRST_WEIGHT = 0.3  # the first step compiles kernels and fills caches
STALE_DEVIATION = 2.0  # after a change, old logs are hardly evidence: 1.0 lost 0.5 % more on late jumps


@dataclass
class Measurements:
    """Means and weights, one per size; all logs relative to `origin`, the first observation."""

    count: FloatArray
    mean: FloatArray
    origin: float | None = None
    noise_variance: float = NOISE_PRIOR**2
    noise_count: float = NOISE_PRIOR_COUNT

    @classmethod
    def nothing(cls, sizes: int) -> Measurements:
        return cls(np.zeros(sizes), np.zeros(sizes))

    @property
    def noise(self) -> float:
        """Standard deviation of one observation's log."""
        return math.sqrt(self.noise_variance)

    def relative(self, throughput: float) -> float:
        """Log of `throughput` over the first one seen."""
        if self.origin is None:
            self.origin = math.log(throughput)
        return math.log(throughput) - self.origin

    def learn_noise(self, index: int, surprise: float) -> None:
        """Update the noise from how far an observation fell from its prediction at a known size."""
        if self.count[index] <= 0.5:
            return
        known = float(self.count[index])
        clipped = min(abs(surprise), CLIP * self.noise)
        self.noise_count = min(self.noise_count + 1.0, NOISE_WINDOW)
        self.noise_variance += (clipped**2 * known / (1.0 + known) - self.noise_variance) / self.noise_count
        self.noise_variance = max(self.noise_variance, NOISE_FLOOR**2)

    def add(self, index: int, value: float) -> None:
        """Take one observation into its size's mean, and let every size age by one step."""
        first = not self.count.any()
        self.count *= KEPT_PER_STEP
        before = float(self.count[index])
        count = min(before + (FIRST_WEIGHT if first else 1.0), WINDOW)
        change = value - float(self.mean[index])
        if before > 0.2:
            change = max(-CLIP * self.noise, min(CLIP * self.noise, change))
        self.mean[index] += change / max(count, 1.0) if before > 0.0 else change
        self.count[index] = count

    def distrust(self) -> None:
        """The curve changed: keep only a faint memory of every size."""
        np.minimum(self.count, self.noise_variance / STALE_DEVIATION**2, out=self.count)

    def state(self) -> dict[str, Any]:
        """Plain data; floats survive JSON exactly."""
        return asdict(self) | {"count": self.count.tolist(), "mean": self.mean.tolist()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Measurements:
        arrays = {name: np.array(state[name], dtype=float) for name in ("count", "mean")}
        return cls(**{**state, **arrays})
