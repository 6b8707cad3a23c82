"""What the controller maximises: throughput, or goodput, which also counts what a sample teaches.

Goodput = throughput x (phi + p0) / (phi + p): beyond the gradient noise scale phi further samples of a
batch say mostly the same. p0 is the reference batch; it scales goodput and moves no optimum.

Source: statistical efficiency, Pollux (Qiao et al., OSDI 2021, arXiv:2008.12260); noise scale,
McCandlish et al., arXiv:1812.06162.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Objective = Literal["throughput", "goodput"]

ENOUGH_SAMPLES = 5  # one estimate of the noise scale is off by a factor of two or more
LEAST_PHI, LARGEST_PHI = 1e-9, 1e18  # rollouts; beyond them no batch that exists tells the difference
SMOOTHING = 0.9  # per sample, of the log; the noise scale grows over a run


def goodput_best(sigma: float, kappa: float, noise_scale: float) -> float:
    """Concurrency of the highest goodput, at least 1; infinite when nothing limits it.

    The positive root of 2 kappa p^3 + (sigma - kappa + kappa phi) p^2 = (1 - sigma) phi, where the
    derivative of goodput vanishes.

    Args:
        sigma: contention, in [0, 1].
        kappa: crosstalk, at least 0.
        noise_scale: phi, in samples like p, positive.
    """
    phi = min(max(noise_scale, LEAST_PHI), LARGEST_PHI)
    square = sigma - kappa + kappa * phi
    constant = (1.0 - sigma) * phi
    if kappa <= 0.0:
        return max(1.0, math.sqrt(constant / square)) if square > 0.0 else math.inf
    # The cubic is convex from here on and positive here, so Newton's method falls onto the root. The
    # second bound, throughput's own optimum, is near where phi is large and the first one far off.
    root = max(0.0, -square) / (2.0 * kappa) + math.pow(constant / (2.0 * kappa), 1.0 / 3.0)
    root = min(root, math.sqrt((1.0 - sigma) / kappa))
    for _ in range(60):
        slope = 6.0 * kappa * root**2 + 2.0 * square * root
        if slope <= 0.0:
            break
        step = (2.0 * kappa * root**3 + square * root**2 - constant) / slope
        root -= step
        if step <= 1e-12 * root:
            break
    return max(1.0, root)


@dataclass
class NoiseScaleTrack:
    """A running geometric mean of the measured gradient noise scale."""

    log_mean: float = 0.0
    samples: int = 0

    def add(self, noise_scale: float | None) -> None:
        """Take a sample; an estimate that is not positive and finite says nothing and is skipped."""
        if noise_scale is None or not (0.0 < noise_scale < math.inf):
            return
        self.samples += 1
        share = max(1.0 - SMOOTHING, 1.0 / self.samples)
        self.log_mean += share * (math.log(noise_scale) - self.log_mean)

    @property
    def is_known(self) -> bool:
        return self.samples >= ENOUGH_SAMPLES

    @property
    def noise_scale(self) -> float:
        return math.exp(self.log_mean)
