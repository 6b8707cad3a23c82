"""Measurements per batch size: an exponentially aging mean of log throughput, and the noise.

Logs, because noise and gains of throughput are relative. One mean per size instead of one sliding window, so
many steps at one size do not displace the measurements of the others.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

from retrain.controllers import StateDict
from retrain.rollouts import Floats

WINDOW = 100.0  # largest count of a mean, so that it follows slow drift
KEPT_PER_STEP = 0.993  # other sizes' observations lose half of their weight in 100 steps
NOISE_PRIOR = 0.15  # standard deviation of log throughput before any size was repeated
NOISE_PRIOR_COUNT = 6.0
NOISE_WINDOW = 60.0
NOISE_FLOOR = 0.01  # real noise is never lower; a smaller value would cause false alarms
CLIP = 3.0  # standard deviations at which a residual is clipped
FIRST_WEIGHT = 0.3  # the first step compiles kernels and fills caches
STALE_DEVIATION = 2.0  # of old logs after a change point; 1.0 lost 0.5 % more throughput on late jumps


@dataclass
class Measurements:
    """Means and weights, one per size; all logs relative to `origin`, the first observation."""

    count: Floats
    mean: Floats
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
        """Return the log of `throughput` over the first one observed."""
        if self.origin is None:
            self.origin = math.log(throughput)
        return math.log(throughput) - self.origin

    def learn_noise(self, index: int, surprise: float) -> None:
        """Update the noise from the residual of an observation at a known size."""
        if self.count[index] <= 0.5:
            return
        known = float(self.count[index])
        clipped = min(abs(surprise), CLIP * self.noise)
        self.noise_count = min(self.noise_count + 1.0, NOISE_WINDOW)
        self.noise_variance += (clipped**2 * known / (1.0 + known) - self.noise_variance) / self.noise_count
        self.noise_variance = max(self.noise_variance, NOISE_FLOOR**2)

    def add(self, index: int, value: float) -> None:
        """Add an observation to its size's mean, and age every size by one step."""
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
        """Discount all earlier observations after a change point."""
        np.minimum(self.count, self.noise_variance / STALE_DEVIATION**2, out=self.count)

    def state(self) -> StateDict:
        """Return plain data; floats round-trip exactly through JSON."""
        return asdict(self) | {"count": self.count.tolist(), "mean": self.mean.tolist()}

    @classmethod
    def from_state(cls, state: StateDict) -> Measurements:
        arrays = {name: np.array(state[name], dtype=float) for name in ("count", "mean")}
        return cls(**{**state, **arrays})
