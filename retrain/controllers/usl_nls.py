"""Bounded non-linear least squares for the Universal Scalability Law, in numpy alone.

Levenberg-Marquardt with projection onto 0 <= sigma <= 1, 0 <= kappa <= 1; a coefficient on its bound whose
gradient points outward is held there for the step. It refuses nothing: the caller has checked the data.

Source: Kanzow, Yamashita and Fukushima, projected Levenberg-Marquardt methods (2004).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from retrain.controllers.usl_online import StepTime
from retrain.controllers.usl_scaled import TINY, BoolArray, Data, FloatArray

LOWER = np.array([0.0, 0.0, TINY])  # contention, crosstalk, level
MAX_STEPS = 500  # published data sets need 5 to 30
GAIN_TOLERANCE = 1e-15  # relative fall of the squared error below which a step changes nothing


def fit_least_squares(data: Data, guess: StepTime) -> FloatArray:
    """Coefficients (contention, crosstalk, level) of least squared error.

    Several starts guard against a local minimum; the simpler curve wins a tie, so that exactly linear
    data give exactly 0.
    """
    starts = [to_coefficients(guess, data), np.array([0.1, 0.01, float((data.y / data.q).max())])]
    return _simplest(data, [_descend(data, start) for start in starts])


def to_coefficients(time: StepTime, data: Data) -> FloatArray:
    """Turn q / y = lead + load q + crowd q^2 into (contention, crosstalk, level)."""
    total = time.lead + time.load * data.one + time.crowd * data.one**2
    return np.array([(time.load + time.crowd * data.one) / total, time.crowd / total, 1.0 / total])


def _jacobian(data: Data, theta: FloatArray) -> FloatArray:
    """Derivatives of the curve in the three coefficients, shape (n, 3)."""
    jacobian = data.curve(theta)[:, None] * data.log_jacobian(theta)
    jacobian[:, 2] /= theta[2]
    return jacobian


def _simplest(data: Data, candidates: list[FloatArray]) -> FloatArray:
    q, y = data.q, data.y
    linear = np.array([0.0, 0.0, float(q @ y) / float(q @ q)])
    start = np.array([0.1, 0.0, float((y / q).max())])
    saturating = _descend(data, start, held=np.array([False, True, False]))
    best = linear
    for theta in (saturating, *candidates):
        # Rounding leaves about 1e-28 of the squared data; anything below that is no improvement.
        if squared_error(data, theta) < squared_error(data, best) * (1.0 - 1e-9) - 1e-24 * float(y @ y):
            best = theta
    return best


def squared_error(data: Data, theta: FloatArray) -> float:
    """Sum of squared residuals of y; infinite where the curve is not positive (p below 1, large kappa)."""
    if not np.all(data.slowdown(theta) > 0.0):
        return math.inf
    residual = data.y - data.curve(theta)
    return float(residual @ residual)


def _descend(data: Data, start: FloatArray, held: BoolArray | None = None) -> FloatArray:
    upper = data.upper
    theta, damping = np.clip(start, LOWER, upper), 1e-3
    error = squared_error(data, theta)
    if math.isinf(error):
        return theta
    for _ in range(MAX_STEPS):
        trial = np.clip(theta + _step(data, theta, damping, held), LOWER, upper)
        trial_error = squared_error(data, trial)
        if not trial_error < error:
            damping *= 4.0
            if damping > 1e12:
                break
            continue
        settled = error - trial_error <= GAIN_TOLERANCE * error
        theta, error, damping = trial, trial_error, max(damping / 5.0, 1e-12)
        if settled:
            break
    return theta


def _step(data: Data, theta: FloatArray, damping: float, held: BoolArray | None) -> FloatArray:
    jacobian = _jacobian(data, theta)
    descent = jacobian.T @ (data.y - data.curve(theta))
    stuck = ((theta <= LOWER) & (descent < 0.0)) | ((theta >= data.upper) & (descent > 0.0))
    free = ~stuck if held is None else ~(stuck | held)
    step: NDArray[np.float64] = np.zeros(3)
    lengths = np.linalg.norm(jacobian, axis=0)
    free &= lengths > 0.0
    columns = jacobian[:, free] / lengths[free]
    normal = columns.T @ columns + damping * np.eye(int(free.sum()))
    step[free] = np.linalg.solve(normal, descent[free] / lengths[free]) / lengths[free]
    return step
