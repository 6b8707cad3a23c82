"""Tell a change of a series from noise whose successive values are alike, and whose means therefore wander.

Source of the autocorrelation's bias in short series: Kendall 1954, doi:10.2307/2332719.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from retrain.base.rollouts import Floats

MOST_PERSISTENT = 0.97  # autocorrelation; noise above it cannot be told from a trend in some hundred values
ROUNDING = 1e-12  # squared residual of a value on a straight line


def window_rises(values: Floats, window: int) -> Floats:
    """Return by how much the mean of each window is above that of the window before it; NaN if unknown."""
    if len(values) < 2 * window:
        return np.zeros(0)
    means = sliding_window_view(values, window).mean(axis=1)
    return np.asarray(means[window:] - means[:-window])


def deviation(values: Floats) -> float:
    """Return the standard deviation of most values, as of normal noise; 0 if none is known."""
    finite = values[np.isfinite(values)]
    return 1.4826 * float(np.median(np.abs(finite - np.median(finite)))) if finite.size else 0.0


def trend_score(values: Floats) -> float:
    """Return the slope over time in standard errors, with the autocorrelation that the residuals show.

    Infinite for a straight line that rises.
    """
    count = len(values)
    times = np.arange(count) - (count - 1) / 2
    spread, product = max(float(times @ times), 1.0), float(times @ values)
    residuals = values - values.mean() - times * product / spread
    squares = float(residuals @ residuals)
    if squares <= ROUNDING * count:
        return math.inf if product > 0.0 else 0.0
    autocorrelation = float(residuals[1:] @ residuals[:-1]) / squares
    autocorrelation += (1 + 4 * autocorrelation) / count
    autocorrelation = min(max(autocorrelation, 0.0), MOST_PERSISTENT)
    variance = squares / max(count - 2, 1) * (1 + autocorrelation) / (1 - autocorrelation)
    return product / math.sqrt(variance * spread)
