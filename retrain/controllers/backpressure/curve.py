"""The fitted curve behind a decision: its optimum for throughput or goodput, and measured over fitted values.

Throughputs are relative to the first one observed. Goodput is throughput x (phi + p0) / (phi + p), with phi
the gradient noise scale: samples of a large batch are redundant. p0, the reference batch, moves no optimum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retrain.controllers.backpressure.posterior import Posterior
from retrain.controllers.usl.online import StepTime, StepTimeFitter

FloatArray = NDArray[np.float64]

ENOUGH_SIZES = 3  # a curve has three coefficients
ENOUGH_SAMPLES = 5  # one estimate of the noise scale is off by a factor of two or more
LEAST_PHI, LARGEST_PHI = 1e-9, 1e18  # rollouts; beyond these limits no realistic batch makes a difference
SMOOTHING = 0.9  # of the log, per sample; the noise scale grows over a run


def goodput_best(sigma: float, kappa: float, noise_scale: float) -> float:
    """Return the concurrency of the highest goodput, at least 1; infinite if goodput has no maximum.

    The positive root of 2 kappa p^3 + (sigma - kappa + kappa phi) p^2 = (1 - sigma) phi, where the
    derivative of goodput vanishes; phi is the noise scale, in samples like p.
    """
    phi = min(max(noise_scale, LEAST_PHI), LARGEST_PHI)
    square = sigma - kappa + kappa * phi
    constant = (1.0 - sigma) * phi
    if kappa <= 0.0:
        return max(1.0, math.sqrt(constant / square)) if square > 0.0 else math.inf
    # The cubic is positive here and convex beyond, so Newton's method descends to the root. For large phi
    # the second bound, the optimum of throughput, is closer than the first.
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
        """Add a sample; estimates that are not positive and finite are skipped."""
        if noise_scale is None or not (0.0 < noise_scale < math.inf):
            return
        self.samples += 1
        share = max(1.0 - SMOOTHING, 1.0 / self.samples)
        self.log_mean += share * (math.log(noise_scale) - self.log_mean)

    @property
    def noise_scale(self) -> float | None:
        """None until there are enough samples."""
        return math.exp(self.log_mean) if self.samples >= ENOUGH_SAMPLES else None


@dataclass(frozen=True)
class FittedCurve:
    """A fit over concurrency p; `time` is None while too few sizes were measured."""

    time: StepTime | None = None

    @property
    def contention_and_crosstalk(self) -> tuple[float, float]:
        """Return sigma and kappa; 0 without a fit."""
        return self.time.coefficients[:2] if self.time is not None else (0.0, 0.0)

    def best(self, noise_scale: float | None) -> float:
        """Return the best concurrency for throughput (goodput, given a noise scale); infinite if unknown."""
        if self.time is None:
            return math.inf
        if noise_scale is None:
            return max(1.0, self.time.best)
        return goodput_best(*self.contention_and_crosstalk, noise_scale)

    def excess(self, p: float, log_throughput: float) -> float:
        """Return measured over fitted throughput; 1 without a fit."""
        if self.time is None:
            return 1.0
        return math.exp(log_throughput) / self.time.throughput(p)

    def highest(self, lowest_p: float, highest_p: float) -> float:
        """Return the highest fitted throughput between two concurrencies; infinite without a fit."""
        if self.time is None:
            return math.inf
        return self.time.throughput(min(max(self.time.best, lowest_p), highest_p))


def fit_curve(
    fitter: StepTimeFitter, concurrency: FloatArray, posterior: Posterior, mean: FloatArray
) -> FittedCurve:
    """Fit the mean log throughputs of all sizes measured so far, shape (sizes,), each with its precision."""
    if np.count_nonzero(posterior.precision) < ENOUGH_SIZES:
        return FittedCurve()
    return FittedCurve(fitter.fit(concurrency * np.exp(-mean), posterior.precision))
