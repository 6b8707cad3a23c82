"""The fitted curve behind a decision: its coefficients, its optimum, and how a measurement compares.

Throughputs here are relative to the first one observed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retrain.controllers.backpressure.objective import goodput_best
from retrain.controllers.backpressure.posterior import Posterior
from retrain.controllers.usl import from_step_time
from retrain.controllers.usl.online import StepTime, StepTimeFitter

FloatArray = NDArray[np.float64]

ENOUGH_SIZES = 3  # a curve has three coefficients


@dataclass(frozen=True)
class Curve:
    """A fit over concurrency p; `time` is None while too few sizes were measured."""

    time: StepTime | None = None

    @property
    def contention_and_crosstalk(self) -> tuple[float, float]:
        """sigma and kappa; 0 without a fit."""
        if self.time is None:
            return 0.0, 0.0
        sigma, kappa, _ = from_step_time(self.time)
        return sigma, kappa

    def best(self, noise_scale: float | None) -> float:
        """Concurrency of the highest throughput, or goodput given a noise scale, at least 1.

        Infinite if unknown.
        """
        if self.time is None:
            return math.inf
        if noise_scale is None:
            return max(1.0, self.time.best)
        return goodput_best(*self.contention_and_crosstalk, noise_scale)

    def excess(self, p: float, log_throughput: float) -> float:
        """Measured over fitted throughput; 1 without a fit."""
        if self.time is None:
            return 1.0
        return math.exp(log_throughput) / self.time.throughput(p)

    def highest(self, lowest_p: float, highest_p: float) -> float:
        """Highest fitted throughput between two concurrencies; infinite without a fit."""
        if self.time is None:
            return math.inf
        return self.time.throughput(min(max(self.time.best, lowest_p), highest_p))


def fit_curve(
    fitter: StepTimeFitter, concurrency: FloatArray, posterior: Posterior, mean: FloatArray
) -> Curve:
    """Fit the mean log throughputs of all sizes measured so far, shape (sizes,), each with its precision."""
    if np.count_nonzero(posterior.precision) < ENOUGH_SIZES:
        return Curve()
    return Curve(fitter.fit(concurrency * np.exp(-mean), posterior.precision))
