"""Posterior of the throughput at every batch size, given a few noisy measurements.

A posterior over the curves of the scalability law, on a fixed grid of hypotheses, plus a deviation of each
size from the curve (staircases and plateaus are not scalability curves). It makes no decision: it computes
an expectation and two variances per size.

A single curve is fitted to it, for the optimum of throughput or goodput, and for measured over fitted values.
Throughputs are relative to the first one observed. Goodput is throughput x (phi + p0) / (phi + p), with phi
the gradient noise scale: samples of a large batch are redundant. p0, the reference batch, moves no optimum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from retrain.base.rollouts import Floats
from retrain.control.rules.backpressure.measurements import Measurements
from retrain.control.rules.usl.online import StepTime, StepTimeFitter

SHAPES_BEST = 16  # hypotheses for the best size, log-spaced, plus one without an optimum
SHAPES_KNEE = 9  # hypotheses for the size at which load equals lead, plus one without load
MODEL_DEVIATION = 0.05  # standard deviation, in logs, of real curves from the law at one size
ENOUGH_SIZES = 3  # a curve has three coefficients
NEAR, SURE = 3.0, 0.9  # an optimum is determined if it is within this factor with this probability
ENOUGH_SAMPLES = 5  # one estimate of the noise scale is off by a factor of two or more
LEAST_PHI, LARGEST_PHI = 1e-9, 1e18  # rollouts; beyond these limits no realistic batch makes a difference
SMOOTHING = 0.9  # of the log, per sample; the noise scale grows over a run


class Posterior:
    """Expected log throughput per size, up to a common constant. All arrays have the shape (sizes,)."""

    def __init__(self, sizes: tuple[int, ...], group_size: int) -> None:
        batch = np.array(sizes, dtype=float)
        best = np.append(np.geomspace(max(0.5 * batch[0], 0.75), 2.0 * batch[-1], SHAPES_BEST), np.inf)
        knee = np.append(np.geomspace(0.5 * batch[0], 4.0 * batch[-1], SHAPES_KNEE), np.inf)
        load, crowd = 1.0 / knee[None, :, None], 1.0 / best[:, None, None] ** 2
        table = np.log(batch) - np.log(1.0 + load * batch + crowd * batch**2)
        shapes = table.reshape(-1, len(sizes))
        self._p_star: Floats = np.repeat(best * group_size, len(knee))  # of every hypothesis
        self._least_p_star, self._largest_p_star = best[0] * group_size, best[-2] * group_size
        self._weights: Floats = np.full(len(shapes), 1.0 / len(shapes))
        self._shapes: Floats = shapes
        self._shapes_and_squares: Floats = np.hstack([shapes, shapes**2])
        self.expected: Floats = np.zeros(len(sizes))
        self.shape_variance: Floats = np.zeros(len(sizes))  # from the unknown shape of the curve
        self.own_variance: Floats = np.zeros(len(sizes))  # of the size's deviation from the curve
        self.precision: Floats = np.zeros(len(sizes))  # 1 / variance of the size's mean around the curve

    def update(self, measured: Measurements) -> None:
        """Recompute everything from the measurements; no history is kept here."""
        model_variance = MODEL_DEVIATION**2
        explained = measured.count / (measured.noise_variance / model_variance + measured.count)
        self.precision = explained / model_variance
        self.own_variance = model_variance - model_variance * explained
        self._weights, level = self._posterior(measured.mean)
        levelled = self._weights * level
        sizes = len(measured.mean)
        moments = self._weights @ self._shapes_and_squares
        curve = moments[:sizes] + float(levelled.sum())
        square = moments[sizes:] + 2.0 * (levelled @ self._shapes) + float(levelled @ level)
        self.shape_variance = np.maximum(square - curve * curve, 0.0)
        self.expected = curve + explained * (measured.mean - curve)

    def determines(self, p_star: float) -> bool:
        """Whether the optimum is probably within a factor of `NEAR`, or, if infinite, above the largest size.

        Optima below the smallest hypothesis are not distinguished, nor are those above the largest one.
        """
        if math.isinf(p_star):
            near = self._p_star > 0.5 * self._largest_p_star
        else:
            inside = min(max(p_star, self._least_p_star), self._largest_p_star)
            near = (self._p_star >= inside / NEAR) & (self._p_star <= inside * NEAR)
        return float(self._weights[near].sum()) >= SURE

    def _posterior(self, mean: Floats) -> tuple[Floats, Floats]:
        """Return weight and best-fitting constant of every hypothesis, shapes (hypotheses,)."""
        total = float(self.precision.sum())
        if total <= 0.0:
            count = len(self._shapes)
            return np.full(count, 1.0 / count), np.zeros(count)
        weighted = self.precision * mean
        level = (float(weighted.sum()) - self._shapes @ self.precision) / total
        misfit = self._shapes_and_squares @ np.concatenate((-2.0 * weighted, self.precision))
        misfit -= total * level * level
        weights = np.exp(0.5 * (float(misfit.min()) - misfit))
        return weights / float(weights.sum()), level


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
    is_determined: bool = False  # whether measurements determine its optimum, or that there is none

    @property
    def contention_and_crosstalk(self) -> tuple[float, float] | tuple[None, None]:
        """Return sigma and kappa; None unless the curve is determined."""
        if self.time is None or not self.is_determined:
            return None, None
        sigma, kappa, _ = self.time.coefficients
        return sigma, kappa

    def best(self, noise_scale: float | None) -> float | None:
        """Return the best concurrency for throughput (goodput, given a noise scale).

        Infinite if the curve has no optimum, None unless the curve is determined.
        """
        if self.time is None or not self.is_determined:
            return None
        if noise_scale is None:
            return max(1.0, self.time.best)
        sigma, kappa, _ = self.time.coefficients
        return goodput_best(sigma, kappa, noise_scale)

    def excess(self, p: float, log_throughput: float) -> float:
        """Return measured over fitted throughput; 1 without a fit."""
        if self.time is None:
            return 1.0
        return math.exp(log_throughput) / self.time.throughput(p)


def fit_curve(fitter: StepTimeFitter, concurrency: Floats, posterior: Posterior, mean: Floats) -> FittedCurve:
    """Fit the mean log throughputs of all sizes measured so far, shape (sizes,), each with its precision."""
    if np.count_nonzero(posterior.precision) < ENOUGH_SIZES:
        return FittedCurve()
    time = fitter.fit(concurrency * np.exp(-mean), posterior.precision)
    return FittedCurve(time, posterior.determines(time.best))
