"""What the throughput of every batch size probably is, given a few noisy measurements.

A posterior over the shapes that the scalability law allows, on a fixed table of hypotheses, plus what
each size's own measurements say beyond the shape (staircases and plateaus are no scalability curve).
Refuses to decide: it gives an expectation and two uncertainties per size.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrain.controllers.backpressure.measurements import Measurements

FloatArray = NDArray[np.float64]

SHAPES_BEST = 16  # hypotheses for the best size, log-spaced, and one without a best
SHAPES_KNEE = 9  # hypotheses for the size at which load equals lead, and one without load
MODEL_DEVIATION = 0.05  # how far, in logs, real curves stray from the law at a single size


class Posterior:
    """Expected log throughput per size, up to a common constant.

    Attributes:
        expected: shape (sizes,).
        shape_variance: shape (sizes,), what not knowing the curve's shape leaves open.
        own_variance: shape (sizes,), what a size may still hold beyond the shape.
        precision: shape (sizes,), one over the variance of each size's mean around its shape.
    """

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
        self.shape_variance: FloatArray = np.zeros(len(sizes))
        self.own_variance: FloatArray = np.zeros(len(sizes))
        self.precision: FloatArray = np.zeros(len(sizes))

    def update(self, measured: Measurements) -> None:
        """Recompute everything from the measurements (no history is kept here)."""
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
        """Weight and level (the free constant, at its best) of every hypothesis, shapes (hypotheses,)."""
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
