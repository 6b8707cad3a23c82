"""Universal Scalability Law: throughput as a function of concurrency, its maximum, and its fit.

X(p) = lambda p / (1 + sigma (p - 1) + kappa p (p - 1)), with lambda the throughput at p = 1, sigma the
contention (the share of work that queues), kappa the crosstalk (pairwise cost). Its maximum is at
p* = sqrt((1 - sigma) / kappa); without crosstalk there is none.

Source: Gunther, Guerrilla Capacity Planning (2007), chapters 4 to 6.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, overload

import numpy as np

from retrain.base.rollouts import Floats
from retrain.control.rules import require
from retrain.control.rules.student import t_quantile

COEFFICIENTS = 3
# For a coefficient that cannot be negative, the 5 % are split into 4 % below the interval and 1 % above: with
# 2.5 % on either side the coverage of a true 0 would be above 95 %, and of any other value below.
MIDDLE, BELOW, ABOVE = 0.975, 0.96, 0.99


@dataclass(frozen=True)
class UslFit:
    """A fitted curve, with its uncertainty; errors are infinite where the data do not determine them."""

    sigma: float  # contention, in [0, 1]
    kappa: float  # crosstalk, in [0, 1]
    lambda_: float  # throughput at p = 1, in the unit of the data
    sigma_error: float = math.inf  # standard errors
    kappa_error: float = math.inf
    lambda_error: float = math.inf
    freedom: int = 0  # observations beyond the three coefficients
    unbounded: tuple[float, float] | None = None  # sigma and kappa without bounds, if any bound is active
    identified: bool = True  # whether the data determine the curve in the measured range, and its optimum
    reason: str = ""  # why they do not, or a caveat

    @property
    def quantile(self) -> float:
        """Half width of a 95 % interval of an unbounded coefficient, in standard errors (Student's t)."""
        return t_quantile(MIDDLE, self.freedom) if self.freedom else math.inf

    @property
    def has_crosstalk(self) -> bool:
        """Whether kappa is significantly above 0; false positives in 2.5 % of data sets."""
        kappa = self.unbounded[1] if self.unbounded else self.kappa
        return kappa > self._half_width(MIDDLE, self.kappa_error)

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % intervals of sigma, kappa and lambda, within their bounds."""
        sigma, kappa = self.unbounded or (self.sigma, self.kappa)
        half = self._half_width(MIDDLE, self.lambda_error)
        return {
            "sigma": self._within_bounds(sigma, self.sigma_error),
            "kappa": self._within_bounds(kappa, self.kappa_error),
            "lambda": (max(0.0, self.lambda_ - half), self.lambda_ + half),
        }

    def _within_bounds(self, centre: float, error: float) -> tuple[float, float]:
        low = centre - self._half_width(BELOW, error)
        high = max(centre, 0.0) + self._half_width(ABOVE, error)
        return min(max(0.0, low), 1.0), min(1.0, high)

    def _half_width(self, probability: float, error: float) -> float:
        """Return a quantile of Student's t times a standard error; infinite without spare observations."""
        if error == 0.0:
            return 0.0
        return t_quantile(probability, self.freedom) * error if self.freedom else math.inf

    @property
    def p_star(self) -> float:
        """Concurrency of the highest throughput; infinite without crosstalk, never below 1."""
        if self.kappa <= 0.0:
            return math.inf
        return max(1.0, math.sqrt(max(0.0, 1.0 - self.sigma) / self.kappa))

    @property
    def peak(self) -> float:
        """Highest throughput: at p*, or the limit lambda / sigma (infinite if sigma is 0)."""
        if math.isfinite(self.p_star):
            return self.throughput(self.p_star)
        return self.lambda_ / self.sigma if self.sigma > 0.0 else math.inf

    @overload
    def throughput(self, p: float) -> float: ...
    @overload
    def throughput(self, p: Floats) -> Floats: ...
    def throughput(self, p: float | Floats) -> float | Floats:
        """Return the predicted throughput at concurrency `p` (any shape)."""
        return self.lambda_ * (p / (1.0 + self.sigma * (p - 1.0) + self.kappa * p * (p - 1.0)))


def fit_usl(
    p: Sequence[float] | Floats,
    x: Sequence[float] | Floats,
    method: Literal["nls", "online"] = "nls",
    noise: Literal["relative", "absolute"] = "relative",
) -> UslFit:
    """Fit the curve to throughputs `x` measured at concurrencies `p`.

    Args:
        p: concurrencies, positive, shape (n,); may contain repeats.
        x: throughputs, positive, any unit, shape (n,).
        method: "nls" is least squares with sigma and kappa in [0, 1]. "online" is the controller's fit:
            squared relative errors of the time per step, non-negative, and robust to outliers.
        noise: for "nls". "relative" minimizes squared errors of log throughput, because measurement
            noise is proportional to throughput. "absolute" minimizes squared errors of throughput, as
            published fits do; its intervals are valid only if all throughputs have the same noise.

    Raises:
        ValueError: shapes differ or are empty, a value is not positive and finite, or the method or
            noise is unknown.
    """
    require("method", method, method in ("nls", "online"), "'nls' or 'online'")
    require("noise", noise, noise in ("relative", "absolute"), "'relative' or 'absolute'")
    squares = LeastSquares.of(*_checked(p, x), is_relative=method == "online" or noise == "relative")
    time = fit_robust(squares.q, squares.y)
    theta = squares.coefficients(time) if method == "online" else fit_least_squares(squares, time)
    bound = np.where(theta >= squares.upper, 1.0, np.where(theta <= 0.0, -1.0, 0.0))
    free = descend(squares, theta, bounds=UNBOUNDED) if method == "nls" and bound.any() else theta
    errors = standard_errors(squares.jacobian(free), squares.rounded_residuals(free))
    unit, (sigma, kappa, lambda_) = squares.one, squares.plain(theta)
    fit = UslFit(
        sigma,
        kappa,
        lambda_,
        sigma_error=float(errors[0]) * unit,
        kappa_error=float(errors[1]) * unit**2,
        lambda_error=float(errors[2]) * lambda_,
        freedom=max(0, len(squares.q) - len(theta)),
        unbounded=(float(free[0]) * unit, float(free[1]) * unit**2),
    )
    lean = leaning(squares.jacobian(theta), squares.rounded_residuals(theta), bound)
    return _judged(fit, squares.q * squares.p_unit, lean[:2])


def _checked(p: Sequence[float] | Floats, x: Sequence[float] | Floats) -> tuple[Floats, Floats]:
    concurrency, throughput = np.asarray(p, dtype=float), np.asarray(x, dtype=float)
    shapes = (concurrency.shape, throughput.shape)
    fit = concurrency.ndim == 1 and concurrency.size > 0 and shapes[0] == shapes[1]
    require("shapes of p and x", shapes, fit, "two equally long, non-empty lists")
    for name, values in (("p", concurrency), ("x", throughput)):
        bad = values[~(np.isfinite(values) & (values > 0.0))].tolist()
        require(name, bad[0] if bad else None, not bad, "positive, finite values")
    return concurrency, throughput


def _judged(fit: UslFit, p: Floats, leaning: Floats) -> UslFit:
    """Return the fit with `identified` and `reason` set; `leaning` is that of (sigma, kappa), shape (2,)."""
    distinct, lowest, highest = len(np.unique(p)), float(p.min()), float(p.max())
    earliest = UslFit(fit.sigma, fit.intervals["kappa"][1], fit.lambda_).p_star  # for the largest kappa
    if distinct < COEFFICIENTS:
        reason = f"{distinct} distinct concurrencies cannot identify three coefficients; measure at least 3"
    else:
        reason = _undetermined(fit, leaning, earliest, highest)
    is_identified = not reason
    if is_identified and highest < fit.p_star < math.inf:
        reason = f"p* {fit.p_star:.4g} is extrapolated: nothing was measured beyond {highest:.4g}"
    elif is_identified and fit.p_star < lowest:
        reason = f"p* {fit.p_star:.4g} is extrapolated: nothing was measured below {lowest:.4g}"
    elif is_identified and fit.kappa == 0.0 and earliest < math.inf:
        reason = f"no optimum up to {highest:.4g}; beyond {earliest:.4g} an optimum is possible"
    return replace(fit, identified=is_identified, reason=reason)


def _undetermined(fit: UslFit, leaning: Floats, earliest: float, highest: float) -> str:
    """Return why the data do not determine the curve: another shape, or too little of them; "" if they do."""
    sigma, kappa = leaning.tolist()
    if max(sigma, kappa) > fit.quantile:
        return "throughput falls faster than any curve of this law (sigma or kappa would be above 1)"
    if sigma < -fit.quantile:
        return "throughput grows faster than concurrency: no curve of this law (sigma would be below 0)"
    if kappa < -fit.quantile:
        return "throughput bends upwards: no curve of this law (kappa would be below 0)"
    high = fit.intervals["kappa"][1]
    if math.isinf(fit.kappa_error):
        return (
            "no observation is left over to estimate noise, or the concurrencies are too close; "
            "measure at more concurrencies"
        )
    if fit.kappa > 0.0 and not fit.has_crosstalk:
        return f"kappa {fit.kappa:.3g} is not significantly above 0: its interval extends to {high:.3g}"
    if fit.kappa == 0.0 and earliest <= highest:
        return f"kappa may be up to {high:.3g}: an optimum at {earliest:.4g} or above is possible"
    return ""


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

    With q = p / p_unit, y = X / x_unit and one = 1 / p_unit, both units the data's largest, so that nothing
    overflows: y = level q / (1 + contention (q - one) + crosstalk q (q - one)), where
    contention = sigma p_unit, crosstalk = kappa p_unit^2, level = lambda p_unit / x_unit. Coefficients
    `theta` are (contention, crosstalk, level). Errors are in log throughput if noise is relative, else in
    throughput.
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
    """Return the coefficients of a local minimum within bounds, which are the law's by default.

    Levenberg-Marquardt with projection, as scipy, which has it, is not in the core; a coefficient on its
    bound whose gradient points outward is held there for the step. Source: Kanzow, Yamashita and Fukushima,
    projected Levenberg-Marquardt methods (2004).
    """
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


HUBER = 1.345  # 95 % efficient on normal noise (Huber and Ronchetti, Robust Statistics, 2009)
ROUNDS = 20  # of re-weighting; the weights converge in about five
TIE = 1e-12  # relative difference attributed to rounding
NEGLIGIBLE = 1e-9  # fraction of the largest term below which a coefficient counts as 0
SUBSETS = ((0, 1, 2), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2))  # of the coefficients
EXACT = 1e-12  # relative residual of data without noise


@dataclass(frozen=True)
class StepTime:
    """Time per step at concurrency p: lead + load p + crowd p^2, in (unit of p) / (unit of X)."""

    lead: float
    load: float
    crowd: float

    @property
    def best(self) -> float:
        """The p of the highest throughput; infinite if crowd is 0."""
        return math.sqrt(self.lead / self.crowd) if self.crowd > 0.0 else math.inf

    @property
    def coefficients(self) -> tuple[float, float, float]:
        total = self.lead + self.load + self.crowd
        return (self.load + self.crowd) / total, self.crowd / total, 1.0 / total

    def throughput(self, p: float) -> float:
        return p / (self.lead + self.load * p + self.crowd * p * p)


class StepTimeFitter:
    """The controller's fit: step times p / X = lead + load p + crowd p^2, repeatedly at fixed concurrencies.

    Linear in its three coefficients, hence exact and cheap; relative errors, because noise is proportional to
    throughput; non-negative, because no part of a step takes negative time (which keeps kappa <= sigma <= 1).

    Args:
        p: concurrency (any unit), positive, shape (n,).
    """

    def __init__(self, p: Floats) -> None:
        self._scale = float(p.max())
        self._powers: Floats = np.stack([(p / self._scale) ** power for power in range(5)])

    def fit(self, time: Floats, weights: Floats) -> StepTime:
        """Minimize the sum of weights (fitted / time - 1)^2 over non-negative coefficients.

        `time` is p / X, the largest at most 1e150 times the smallest; a weight of 0 excludes an entry.
        """
        unit = float(time.min())
        time = time / unit
        scaled = weights / time
        target = (self._powers[:3] @ scaled).tolist()
        moments = (self._powers @ (scaled / time)).tolist()
        gram = [moments[row : row + 3] for row in range(3)]
        best, best_gain = (0.0, 0.0, 0.0), 0.0
        for subset in SUBSETS:  # all three coefficients first, and if they are positive, no other
            if (solution := _solved(gram, target, subset)) is None:
                continue
            gain = sum(value * weight for value, weight in zip(solution, target, strict=True))
            if gain > best_gain * (1.0 + TIE):
                best, best_gain = solution, gain
            if subset == SUBSETS[0]:
                break
        lead, load, crowd = best
        return StepTime(lead * unit, load * unit / self._scale, crowd * unit / self._scale**2)


def fit_robust(p: Floats, x: Floats) -> StepTime:
    """Return the same fit from single observations, with Huber weights against outliers."""
    time, fitter = p / x, StepTimeFitter(p)
    weights = np.ones_like(time)
    fit = fitter.fit(time, weights)
    for _ in range(ROUNDS):
        residual = np.abs(np.log((fit.lead + fit.load * p + fit.crowd * p * p) / time))
        spread = 1.4826 * float(np.median(residual))  # the standard deviation, for normal noise
        if spread < EXACT:
            break
        updated = np.minimum(1.0, HUBER * spread / np.maximum(residual, EXACT))
        fit = fitter.fit(time, updated)
        if np.allclose(updated, weights, rtol=1e-6):
            break
        weights = updated
    return fit


def _solved(
    gram: list[list[float]], target: list[float], subset: tuple[int, ...]
) -> tuple[float, float, float] | None:
    """Return a subset of coefficients, the others 0; None unless the data separate them and all are positive.

    By elimination, which is much cheaper at this size than a library call.
    """
    rows = [[*(gram[i][j] for j in subset), target[i]] for i in subset]
    for k, row in enumerate(rows):
        if row[k] <= TIE * gram[subset[k]][subset[k]]:
            return None
        for other in rows[:k] + rows[k + 1 :]:
            share = other[k] / row[k]
            other[:] = [value - share * pivot for value, pivot in zip(other, row, strict=True)]
    value = [0.0, 0.0, 0.0]
    for k, i in enumerate(subset):
        value[i] = rows[k][-1] / rows[k][k]
    is_positive = min(value[i] for i in subset) > NEGLIGIBLE * max(value)
    return (value[0], value[1], value[2]) if is_positive else None
