"""The Universal Scalability Law in units in which every quantity is near 1, whatever the data's units.

With q = p / p_unit, y = X / x_unit and one = 1 / p_unit, both units the data's largest:

    y = level q / (1 + contention (q - one) + crosstalk q (q - one))

contention = sigma p_unit, crosstalk = kappa p_unit^2, level = lambda p_unit / x_unit. Fits, bounds and errors
live here; nothing overflows, and another unit of throughput changes nothing.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

TINY = 1e-30  # smallest ratio told from 0; squares and products of three stay finite
SMALLEST, LARGEST = math.ulp(0.0), sys.float_info.max
ROUNDING = 1e-12  # residuals of data without noise, relative to the largest throughput
NEAR_ENOUGH = 0.01  # of the largest throughput: a law's job is to be close
SINGULAR = 1e12  # condition number of the normal matrix from which coefficients are not told apart


@dataclass(frozen=True)
class Data:
    """Measurements in their own units, shapes (n,), and how to come back."""

    q: FloatArray
    y: FloatArray
    p_unit: float
    x_unit: float

    @classmethod
    def of(cls, p: FloatArray, x: FloatArray) -> Data:
        """Scale measurements that are positive and finite."""
        p_unit, x_unit = float(p.max()), float(x.max())
        return cls(np.maximum(p / p_unit, TINY), np.maximum(x / x_unit, TINY), p_unit, x_unit)

    @property
    def one(self) -> float:
        """A concurrency of 1 in this unit."""
        return 1.0 / min(max(self.p_unit, TINY), 1.0 / TINY)

    @property
    def upper(self) -> FloatArray:
        """Bounds of (contention, crosstalk, level): sigma <= 1 and kappa <= 1; the lower ones are 0."""
        return np.array([1.0 / self.one, 1.0 / self.one**2, np.inf])

    def slowdown(self, theta: FloatArray) -> FloatArray:
        """How many times longer a unit of work takes than at p = 1, shape (n,); 0 where it cannot be."""
        beyond_one = self.q - self.one
        raw = 1.0 + theta[0] * beyond_one + theta[1] * self.q * beyond_one
        return np.asarray(np.maximum(raw, 0.0))

    def curve(self, theta: FloatArray) -> FloatArray:
        """Fitted y, shape (n,)."""
        return np.asarray(theta[2] * self.q / np.maximum(self.slowdown(theta), TINY))

    def log_jacobian(self, theta: FloatArray) -> FloatArray:
        """Derivatives of log y in contention, crosstalk and log level, shape (n, 3)."""
        share = (self.q - self.one) / np.maximum(self.slowdown(theta), TINY)
        return np.stack([-share, -self.q * share, np.ones_like(share)], axis=1)

    def plain(self, theta: FloatArray) -> tuple[float, float, float]:
        """Turn (contention, crosstalk, level) into (sigma, kappa, lambda)."""
        sigma, kappa = float(theta[0]) * self.one, float(theta[1]) * self.one * self.one
        rate = min(max(float(theta[2]) * self.one * self.x_unit, SMALLEST), LARGEST)
        return min(sigma, 1.0), min(kappa, 1.0), rate


def standard_errors(jacobian: FloatArray, residuals: FloatArray) -> FloatArray:
    """Return standard errors of the linearised fit, shape (3,).

    Infinite where no observation is left over, or the data cannot tell coefficients apart.
    """
    spare = len(residuals) - jacobian.shape[1]
    lengths = np.linalg.norm(jacobian, axis=0)
    if spare < 1 or np.any(lengths == 0.0):
        return np.full(3, np.inf)
    normal = (jacobian / lengths).T @ (jacobian / lengths)
    if np.linalg.cond(normal) > SINGULAR:
        return np.full(3, np.inf)
    variance = float(residuals @ residuals) / spare
    errors: FloatArray = np.sqrt(variance * np.diag(np.linalg.inv(normal))) / lengths
    return errors


def leaning(jacobian: FloatArray, residuals: FloatArray, bound: FloatArray) -> FloatArray:
    """By how many standard errors each coefficient would pass its bound if it could, shape (3,).

    0 for a coefficient inside its bounds, for data that cannot tell, and where passing would change no
    throughput by more than one percent of the largest.

    Args:
        jacobian: shape (n, 3).
        residuals: shape (n,).
        bound: -1 on the lower bound, 1 on the upper one, 0 inside, shape (3,).
    """
    if not bound.any() or not np.isfinite(standard_errors(jacobian, residuals)).all():
        return np.zeros(3)
    lengths = np.linalg.norm(jacobian, axis=0)
    move = np.linalg.lstsq(jacobian / lengths, residuals, rcond=None)[0] / lengths
    change = jacobian @ move
    if float(np.abs(change).max()) <= NEAR_ENOUGH:
        return np.zeros(3)
    errors = standard_errors(jacobian, residuals - change)
    return np.where(move * bound > 0.0, move / np.maximum(errors, math.ulp(0.0)), 0.0)
