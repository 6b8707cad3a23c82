"""Bounded non-linear least squares for the Universal Scalability Law, in numpy alone.

Levenberg-Marquardt with projection onto 0 <= sigma <= 1, kappa >= 0; a coefficient on its bound whose
gradient points outward is held there for the step. It refuses nothing: the caller has checked the data.

Source: Kanzow, Yamashita and Fukushima, projected Levenberg-Marquardt methods (2004).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from retrain.controllers.usl_online import fit_robust

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

LOWER = np.array([0.0, 0.0, 1e-12])  # sigma, kappa, lambda (of throughputs scaled to a maximum of 1)
UPPER = np.array([1.0, np.inf, np.inf])
MAX_STEPS = 500  # published data sets need 5 to 30
GAIN_TOLERANCE = 1e-15  # relative fall of the squared error below which a step changes nothing


def fit_least_squares(
    p: FloatArray, x: FloatArray
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Coefficients (sigma, kappa, lambda) of least squared error, and their standard errors.

    Several starts guard against a local minimum; the simpler curve wins a tie, so that exactly linear
    data give exactly 0.
    """
    scale = float(x.max())
    y = x / scale
    best = _simplest(p, y, [_descend(p, y, start) for start in _starts(p, y)])
    free = (best > LOWER) & (best < UPPER)
    errors = standard_errors(_jacobian(p, best), y - _curve(p, best), free)
    sigma, kappa, lambda_ = (float(value) for value in best)
    return (sigma, kappa, lambda_ * scale), (float(errors[0]), float(errors[1]), float(errors[2]) * scale)


def standard_errors(jacobian: FloatArray, residuals: FloatArray, free: BoolArray) -> FloatArray:
    """Standard errors from the linearised fit, shape (coefficients,); 0 for one held on its bound.

    Infinite where there are no more data than free coefficients, or the data cannot tell them apart.
    """
    errors = np.where(free, np.inf, 0.0)
    spare = len(residuals) - int(free.sum())
    columns = jacobian[:, free]
    lengths = np.linalg.norm(columns, axis=0)
    if spare < 1 or np.any(lengths == 0.0):
        return errors
    normal = (columns / lengths).T @ (columns / lengths)
    if np.linalg.cond(normal) > 1e12:
        return errors
    variance = float(residuals @ residuals) / spare
    errors[free] = np.sqrt(variance * np.diag(np.linalg.inv(normal))) / lengths
    return errors


def _curve(p: FloatArray, theta: FloatArray) -> FloatArray:
    sigma, kappa, lambda_ = theta
    return np.asarray(lambda_ * p / (1.0 + sigma * (p - 1.0) + kappa * p * (p - 1.0)), dtype=float)


def _jacobian(p: FloatArray, theta: FloatArray) -> FloatArray:
    curve = _curve(p, theta)
    slowdown = 1.0 + theta[0] * (p - 1.0) + theta[1] * p * (p - 1.0)
    return np.stack(
        [-curve * (p - 1.0) / slowdown, -curve * p * (p - 1.0) / slowdown, curve / theta[2]], axis=1
    )


def _starts(p: FloatArray, y: FloatArray) -> list[FloatArray]:
    time = fit_robust(p, y)
    total = time.lead + time.load + time.crowd
    return [
        np.array([(time.load + time.crowd) / total, time.crowd / total, 1.0 / total]),
        np.array([0.1, 0.01, float((y / p).max())]),
    ]


def _simplest(p: FloatArray, y: FloatArray, candidates: list[FloatArray]) -> FloatArray:
    linear = np.array([0.0, 0.0, float(p @ y) / float(p @ p)])
    saturating = _descend(
        p, y, np.array([0.1, 0.0, float((y / p).max())]), held=np.array([False, True, False])
    )
    best = linear
    for theta in (saturating, *candidates):
        # Rounding leaves about 1e-28 of the squared data; anything below that is no improvement.
        if _squared_error(p, y, theta) < _squared_error(p, y, best) * (1.0 - 1e-9) - 1e-24 * float(y @ y):
            best = theta
    return best


def _squared_error(p: FloatArray, y: FloatArray, theta: FloatArray) -> float:
    residual = y - _curve(p, theta)
    return float(residual @ residual)


def _descend(p: FloatArray, y: FloatArray, start: FloatArray, held: BoolArray | None = None) -> FloatArray:
    theta, damping = np.clip(start, LOWER, UPPER), 1e-3
    error = _squared_error(p, y, theta)
    for _ in range(MAX_STEPS):
        step = _step(p, y, theta, damping, held)
        trial = np.clip(theta + step, LOWER, UPPER)
        trial_error = _squared_error(p, y, trial)
        if trial_error >= error:
            damping *= 4.0
            if damping > 1e12:
                break
            continue
        settled = error - trial_error <= GAIN_TOLERANCE * error
        theta, error, damping = trial, trial_error, max(damping / 5.0, 1e-12)
        if settled:
            break
    return theta


def _step(
    p: FloatArray, y: FloatArray, theta: FloatArray, damping: float, held: BoolArray | None
) -> FloatArray:
    jacobian = _jacobian(p, theta)
    descent = jacobian.T @ (y - _curve(p, theta))
    stuck = ((theta <= LOWER) & (descent < 0.0)) | ((theta >= UPPER) & (descent > 0.0))
    free = ~stuck if held is None else ~(stuck | held)
    step = np.zeros(3)
    columns = jacobian[:, free]
    normal = columns.T @ columns
    ridge = np.diag(damping * np.maximum(np.diag(normal), math.ulp(1.0)))
    step[free] = np.linalg.solve(normal + ridge, descent[free])
    return step
