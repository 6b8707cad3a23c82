"""Bounded non-linear least squares for the Universal Scalability Law, in numpy alone.

scipy has such a solver, but it is not in the core.

Levenberg-Marquardt with projection onto 0 <= sigma <= 1, 0 <= kappa <= 1; a coefficient on its bound whose
gradient points outward is held there for the step. The caller validates the data.

Every quantity is scaled to be near 1: with q = p / p_unit, y = X / x_unit and one = 1 / p_unit, both units
the data's largest, y = level q / (1 + contention (q - one) + crosstalk q (q - one)), where
contention = sigma p_unit, crosstalk = kappa p_unit^2, level = lambda p_unit / x_unit. Nothing overflows, and
the result does not depend on the unit of throughput.

Source: Kanzow, Yamashita and Fukushima, projected Levenberg-Marquardt methods (2004).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np

from retrain.base.rollouts import Floats
from retrain.control.rules.usl.online import StepTime

Bounds = tuple[Floats, Floats]

TINY = 1e-30  # smallest ratio distinguished from 0; squares and products of three stay finite
SMALLEST, LARGEST = math.ulp(0.0), sys.float_info.max
ROUNDING = 1e-12  # residuals of data without noise, relative to the largest throughput
NEAR_ENOUGH = 0.01  # of the largest throughput; smaller deviations from the law are accepted
LOWER = np.array([0.0, 0.0, TINY])  # contention, crosstalk, level
UNBOUNDED = (np.array([-np.inf, -np.inf, TINY]), np.full(3, np.inf))
MAX_STEPS = 500  # published data sets need 5 to 30
GAIN_TOLERANCE = 1e-15  # relative decrease of the squared error that counts as converged
SINGULAR = 1e12  # condition number of the normal matrix above which coefficients are not identifiable


@dataclass(frozen=True)
class LeastSquares:
    """Scaled measurements, shapes (n,), their units, and whether noise is relative.

    Coefficients `theta` are (contention, crosstalk, level). Errors are in log throughput if noise is
    relative, else in throughput.
    """

    q: Floats
    y: Floats
    p_unit: float
    x_unit: float
    is_relative: bool

    @classmethod
    def of(cls, p: Floats, x: Floats, *, is_relative: bool) -> LeastSquares:
        """Scale measurements that are positive and finite."""
        p_unit, x_unit = float(p.max()), float(x.max())
        return cls(np.maximum(p / p_unit, TINY), np.maximum(x / x_unit, TINY), p_unit, x_unit, is_relative)

    @property
    def one(self) -> float:
        """A concurrency of 1 in units of `p_unit`."""
        return 1.0 / min(max(self.p_unit, TINY), 1.0 / TINY)

    @property
    def upper(self) -> Floats:
        """Bounds of the coefficients: sigma <= 1 and kappa <= 1; lower bounds are 0."""
        return np.array([1.0 / self.one, 1.0 / self.one**2, np.inf])

    def slowdown(self, theta: Floats) -> Floats:
        """Return the time per unit of work relative to p = 1, shape (n,); 0 where it would be negative."""
        beyond_one = self.q - self.one
        raw = 1.0 + theta[0] * beyond_one + theta[1] * self.q * beyond_one
        return np.asarray(np.maximum(raw, 0.0))

    def curve(self, theta: Floats) -> Floats:
        """Return the fitted y, shape (n,)."""
        return np.asarray(theta[2] * self.q / np.maximum(self.slowdown(theta), TINY))

    def residuals(self, theta: Floats) -> Floats:
        """Return measured minus fitted, shape (n,)."""
        curve = self.curve(theta)
        return np.log(self.y / curve) if self.is_relative else self.y - curve

    def rounded_residuals(self, theta: Floats) -> Floats:
        """Return residuals, with rounding errors set to 0, shape (n,)."""
        residuals = self.residuals(theta)
        return np.where(np.abs(residuals) < ROUNDING, 0.0, residuals)

    def jacobian(self, theta: Floats) -> Floats:
        """Return derivatives of the fitted quantity by contention, crosstalk and log level, shape (n, 3)."""
        share = (self.q - self.one) / np.maximum(self.slowdown(theta), TINY)
        jacobian = np.stack([-share, -self.q * share, np.ones_like(share)], axis=1)
        return jacobian if self.is_relative else self.curve(theta)[:, None] * jacobian

    def squared(self, theta: Floats) -> float:
        """Return the sum of squares; infinite where the curve is not positive (p < 1, large kappa)."""
        if not np.all(self.slowdown(theta) > 0.0):
            return math.inf
        residuals = self.residuals(theta)
        return float(residuals @ residuals)

    def coefficients(self, time: StepTime) -> Floats:
        """Convert q / y = lead + load q + crowd q^2 to coefficients."""
        total = time.lead + time.load * self.one + time.crowd * self.one**2
        return np.array([(time.load + time.crowd * self.one) / total, time.crowd / total, 1.0 / total])

    def plain(self, theta: Floats) -> tuple[float, float, float]:
        """Convert coefficients to (sigma, kappa, lambda)."""
        sigma, kappa = float(theta[0]) * self.one, float(theta[1]) * self.one * self.one
        rate = min(max(float(theta[2]) * self.one * self.x_unit, SMALLEST), LARGEST)
        return min(sigma, 1.0), min(kappa, 1.0), rate


def standard_errors(jacobian: Floats, residuals: Floats) -> Floats:
    """Return standard errors of the linearised fit, shape (3,).

    Infinite without spare observations, or if the data cannot separate the coefficients.
    """
    spare = len(residuals) - jacobian.shape[1]
    lengths = np.linalg.norm(jacobian, axis=0)
    if spare < 1 or np.any(lengths == 0.0):
        return np.full(3, np.inf)
    normal = (jacobian / lengths).T @ (jacobian / lengths)
    if np.linalg.cond(normal) > SINGULAR:
        return np.full(3, np.inf)
    variance = float(residuals @ residuals) / spare
    errors: Floats = np.sqrt(variance * np.diag(np.linalg.inv(normal))) / lengths
    return errors


def leaning(jacobian: Floats, residuals: Floats, bound: Floats) -> Floats:
    """Return by how many standard errors each unbounded coefficient exceeds its bound, shape (3,).

    0 for a coefficient inside its bounds, for data that do not determine it, and where removing the bound
    would change no throughput by more than one percent of the largest. `bound` is -1 on the lower bound,
    1 on the upper bound and 0 inside.
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


def fit_least_squares(squares: LeastSquares, guess: StepTime) -> Floats:
    """Return the least-squares coefficients.

    Several starts guard against local minima; the simpler curve wins a tie, so that exactly linear data
    give exactly 0.
    """
    q, y = squares.q, squares.y
    if squares.is_relative:
        level, rounding = np.exp(np.log(y / q).mean()), ROUNDING**2 * len(y)
    else:
        level, rounding = (q @ y) / (q @ q), ROUNDING**2 * float(y @ y)
    highest = float((y / q).max())
    no_crosstalk = LOWER, squares.upper * (1.0, 0.0, 1.0)
    saturating = descend(squares, np.array([0.1, 0.0, highest]), bounds=no_crosstalk)
    starts = [squares.coefficients(guess), np.array([0.1, 0.01, highest])]
    best = np.array([0.0, 0.0, float(level)])  # without contention or crosstalk
    for theta in (saturating, *[descend(squares, start) for start in starts]):
        if squares.squared(theta) < squares.squared(best) * (1.0 - 1e-9) - rounding:
            best = theta
    return best


def descend(squares: LeastSquares, start: Floats, *, bounds: Bounds | None = None) -> Floats:
    """Return the coefficients of a local minimum within bounds, which are the law's by default."""
    bounds = bounds or (LOWER, squares.upper)
    theta, damping = np.clip(start, *bounds), 1e-3
    error = squares.squared(theta)
    if math.isinf(error):
        return theta
    for _ in range(MAX_STEPS):
        candidate = np.clip(theta + _step(squares, theta, damping, bounds), *bounds)
        candidate_error = squares.squared(candidate)
        if not candidate_error < error:
            damping *= 4.0
            if damping > 1e12:
                break
            continue
        settled = error - candidate_error <= GAIN_TOLERANCE * error
        theta, error, damping = candidate, candidate_error, max(damping / 5.0, 1e-12)
        if settled:
            break
    return theta


def _step(squares: LeastSquares, theta: Floats, damping: float, bounds: Bounds) -> Floats:
    jacobian = squares.jacobian(theta)
    jacobian[:, 2] /= theta[2]
    descent = jacobian.T @ squares.residuals(theta)
    stuck = ((theta <= bounds[0]) & (descent < 0.0)) | ((theta >= bounds[1]) & (descent > 0.0))
    step: Floats = np.zeros(3)
    lengths = np.linalg.norm(jacobian, axis=0)
    free = ~stuck & (lengths > 0.0)
    columns = jacobian[:, free] / lengths[free]
    normal = columns.T @ columns + damping * np.eye(int(free.sum()))
    step[free] = np.linalg.solve(normal, descent[free] / lengths[free]) / lengths[free]
    return step
