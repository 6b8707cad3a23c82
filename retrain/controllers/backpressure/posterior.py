"""Posterior of the throughput at every batch size, given a few noisy measurements.

A posterior over the curves of the scalability law, on a fixed grid of hypotheses, plus a deviation of each
size from the curve (staircases and plateaus are not scalability curves). It makes no decision: it computes
an expectation and two variances per size.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrain.controllers.backpressure.measurements import Measurements

FloatArray = NDArray[np.float64]

SHAPES_BEST = 16  # hypotheses for the best size, log-spaced, plus one without an optimum
SHAPES_KNEE = 9  # hypotheses for the size at which load equals lead, plus one without load
MODEL_DEVIATION = 0.05  # standard deviation, in logs, of real curves from the law at one size


class Posterior:
    """Expected log throughput per size, up to a common constant. All arrays have the shape (sizes,)."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        batch = np.array(sizes, dtype=float)
        best = np.append(np.geomspace(max(0.5 * batch[0], 0.75), 2.0 * batch[-1], SHAPES_BEST), np.inf)
        knee = np.append(np.geomspace(0.5 * batch[0], 4.0 * batch[-1], SHAPES_KNEE), np.inf)
        load, crowd = 1.0 / knee[None, :, None], 1.0 / best[:, None, None] ** 2
        table = np.log(batch) - np.log(1.0 + load * batch + crowd * batch**2)
        shapes = table.reshape(-1, len(sizes))
        self._shapes: FloatArray = shapes
        self._shapes_and_squares: FloatArray = np.hstack([shapes, shapes**2])
        self.expected: FloatArray = np.zeros(len(sizes))
        self.shape_variance: FloatArray = np.zeros(len(sizes))  # from the unknown shape of the curve
        self.own_variance: FloatArray = np.zeros(len(sizes))  # of the size's deviation from the curve
        self.precision: FloatArray = np.zeros(len(sizes))  # 1 / variance of the size's mean around the curve

    def update(self, measured: Measurements) -> None:
        """Recompute everything from the measurements; no history is kept here."""
        model_variance = MODEL_DEVIATION**2
        explained = measured.count / (measured.noise_variance / model_variance + measured.count)
        self.precision = explained / model_variance
        self.own_variance = model_variance - model_variance * explained
        weights, level = self._posterior(measured.mean)
        levelled = weights * level
        sizes = len(measured.mean)
        moments = weights @ self._shapes_and_squares
        curve = moments[:sizes] + float(levelled.sum())
        square = moments[sizes:] + 2.0 * (levelled @ self._shapes) + float(levelled @ level)
        self.shape_variance = np.maximum(square - curve * curve, 0.0)
        self.expected = curve + explained * (measured.mean - curve)

    def _posterior(self, mean: FloatArray) -> tuple[FloatArray, FloatArray]:
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
