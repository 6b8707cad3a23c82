"""Universal Scalability Law: throughput as a function of concurrency, its maximum, and its fit.

X(p) = lambda p / (1 + sigma (p - 1) + kappa p (p - 1)), with lambda the throughput at p = 1, sigma the
contention (the share of work that queues), kappa the crosstalk (pairwise cost). Its maximum is at
p* = sqrt((1 - sigma) / kappa); without crosstalk there is none.

Source: Gunther, Guerrilla Capacity Planning (2007), chapters 4 to 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, overload

import numpy as np

from retrain.base.rollouts import Floats
from retrain.control.rules import require
from retrain.control.rules.usl.nls import (
    UNBOUNDED,
    LeastSquares,
    descend,
    fit_least_squares,
    leaning,
    standard_errors,
)
from retrain.control.rules.usl.online import fit_robust

COEFFICIENTS = 3


@dataclass(frozen=True)
class Quantile:
    """A quantile of Student's t: of the normal distribution, and of 1 to 5 degrees of freedom."""

    normal: float
    few: tuple[float, float, float, float, float]

    def errors(self, freedom: int, error: float) -> float:
        """Return the quantile times a standard error; 0 for an error of 0."""
        return self.of(freedom) * error if error > 0.0 else 0.0

    def of(self, freedom: int) -> float:
        """Return the quantile for the degrees of freedom; infinite below 1."""
        if freedom < 1:
            return math.inf
        if freedom <= len(self.few):
            return self.few[freedom - 1]
        z, n = self.normal, freedom  # Abramowitz and Stegun, 26.7.5
        second, third = 5 * z**5 + 16 * z**3 + 3 * z, 3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z
        return z + (z**3 + z) / (4 * n) + second / (96 * n**2) + third / (384 * n**3)


MIDDLE = Quantile(1.959964, (12.7062, 4.3027, 3.1824, 2.7764, 2.5706))  # 97.5 %
# For a coefficient that cannot be negative, the 5 % are split into 4 % below the interval and 1 % above: with
# 2.5 % on either side the coverage of a true 0 would be above 95 %, and of any other value below.
BELOW = Quantile(1.750686, (7.9158, 3.3198, 2.6054, 2.3329, 2.1910))  # 96 %
ABOVE = Quantile(2.326348, (31.8205, 6.9646, 4.5407, 3.7469, 3.3649))  # 99 %


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
        return MIDDLE.of(self.freedom)

    @property
    def has_crosstalk(self) -> bool:
        """Whether kappa is significantly above 0; false positives in 2.5 % of data sets."""
        kappa = self.unbounded[1] if self.unbounded else self.kappa
        return kappa > MIDDLE.errors(self.freedom, self.kappa_error)

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % intervals of sigma, kappa and lambda, within their bounds."""
        sigma, kappa = self.unbounded or (self.sigma, self.kappa)
        half = MIDDLE.errors(self.freedom, self.lambda_error)
        return {
            "sigma": self._within_bounds(sigma, self.sigma_error),
            "kappa": self._within_bounds(kappa, self.kappa_error),
            "lambda": (max(0.0, self.lambda_ - half), self.lambda_ + half),
        }

    def _within_bounds(self, centre: float, error: float) -> tuple[float, float]:
        low = centre - BELOW.errors(self.freedom, error)
        high = max(centre, 0.0) + ABOVE.errors(self.freedom, error)
        return min(max(0.0, low), 1.0), min(1.0, high)

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
    one, (sigma, kappa, lambda_) = squares.one, squares.plain(theta)
    fit = UslFit(
        sigma,
        kappa,
        lambda_,
        sigma_error=float(errors[0]) * one,
        kappa_error=float(errors[1]) * one**2,
        lambda_error=float(errors[2]) * lambda_,
        freedom=max(0, len(squares.q) - len(theta)),
        unbounded=(float(free[0]) * one, float(free[1]) * one**2),
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
