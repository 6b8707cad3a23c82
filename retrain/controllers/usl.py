"""Universal Scalability Law: what throughput a level of concurrency buys, and where it is best.

X(p) = lambda p / (1 + sigma (p - 1) + kappa p (p - 1)), with lambda the throughput at p = 1, sigma the
contention (the share of work that queues), kappa the crosstalk (pairwise cost). Its maximum lies at
p* = sqrt((1 - sigma) / kappa); without crosstalk there is none. Nothing here decides what to do about it.

Source: Gunther, Guerrilla Capacity Planning (2007), chapters 4 to 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray

from retrain.controllers.usl_nls import fit_least_squares, standard_errors
from retrain.controllers.usl_online import StepTime, fit_robust

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class UslFit:
    """A fitted curve, with how far to trust it.

    Attributes:
        sigma: contention, in [0, 1].
        kappa: crosstalk, at least 0.
        lambda_: throughput at p = 1, in the unit of the data.
        sigma_error, kappa_error, lambda_error: standard errors; infinite where the data leave no degree
            of freedom, 0 for a coefficient that lies on its bound.
        identified: whether the data determine the curve.
        reason: why they do not, or what to bear in mind; empty when there is nothing to say.
    """

    sigma: float
    kappa: float
    lambda_: float
    sigma_error: float = math.inf
    kappa_error: float = math.inf
    lambda_error: float = math.inf
    identified: bool = True
    reason: str = ""

    @property
    def p_star(self) -> float:
        """Concurrency of the highest throughput; infinite without crosstalk, never below 1."""
        if self.kappa <= 0.0:
            return math.inf
        return max(1.0, math.sqrt(max(0.0, 1.0 - self.sigma) / self.kappa))

    @property
    def peak(self) -> float:
        """Highest throughput: at p*, or the limit lambda / sigma (infinite when that is 0)."""
        if math.isfinite(self.p_star):
            return self.throughput(self.p_star)
        return self.lambda_ / self.sigma if self.sigma > 0.0 else math.inf

    @overload
    def throughput(self, p: float) -> float: ...
    @overload
    def throughput(self, p: FloatArray) -> FloatArray: ...
    def throughput(self, p: float | FloatArray) -> float | FloatArray:
        """Predicted throughput at concurrency `p` (any shape)."""
        return self.lambda_ * p / (1.0 + self.sigma * (p - 1.0) + self.kappa * p * (p - 1.0))


def fit_usl(
    p: Sequence[float] | FloatArray, x: Sequence[float] | FloatArray, method: Literal["nls", "online"] = "nls"
) -> UslFit:
    """Fit the curve to throughputs `x` measured at concurrencies `p`.

    Args:
        p: concurrencies, positive, shape (n,); repeats are welcome.
        x: throughputs, positive, any unit, shape (n,).
        method: "nls" minimises squared errors of throughput with 0 <= sigma <= 1 and kappa >= 0, which
            reproduces published coefficients. "online" is the controller's fit: squared relative errors
            of the time per step, non-negative, and deaf to outliers.

    Raises:
        ValueError: shapes differ, nothing was measured, a value is not positive and finite, or the
            method is unknown.
    """
    concurrency, throughput = _checked(p, x)
    if method == "nls":
        coefficients, errors = fit_least_squares(concurrency, throughput)
    elif method == "online":
        coefficients = from_step_time(fit_robust(concurrency, throughput))
        errors = _relative_errors(concurrency, throughput, coefficients)
    else:
        raise ValueError(f"method: got {method!r}; use 'nls' or 'online'")
    return _described(concurrency, coefficients, errors)


def from_step_time(time: StepTime) -> tuple[float, float, float]:
    """Turn p / X = lead + load p + crowd p^2 into (sigma, kappa, lambda)."""
    total = time.lead + time.load + time.crowd
    return (time.load + time.crowd) / total, time.crowd / total, 1.0 / total


def _relative_errors(
    p: FloatArray, x: FloatArray, coefficients: tuple[float, float, float]
) -> tuple[float, float, float]:
    """Standard errors from relative residuals: the Jacobian of log X."""
    fit = UslFit(*coefficients)
    slowdown = 1.0 + fit.sigma * (p - 1.0) + fit.kappa * p * (p - 1.0)
    jacobian = np.stack(
        [-(p - 1.0) / slowdown, -p * (p - 1.0) / slowdown, np.full_like(p, 1.0 / fit.lambda_)], axis=1
    )
    free = np.array([0.0 < fit.sigma < 1.0, fit.kappa > 0.0, True])
    sigma, kappa, lambda_ = standard_errors(jacobian, np.log(x / fit.throughput(p)), free)
    return float(sigma), float(kappa), float(lambda_)


def _checked(
    p: Sequence[float] | FloatArray, x: Sequence[float] | FloatArray
) -> tuple[FloatArray, FloatArray]:
    concurrency, throughput = np.asarray(p, dtype=float), np.asarray(x, dtype=float)
    if concurrency.ndim != 1 or concurrency.shape != throughput.shape or concurrency.size == 0:
        raise ValueError(
            f"p and x: got shapes {concurrency.shape} and {throughput.shape}; "
            "give two equally long, non-empty lists"
        )
    for name, values in (("p", concurrency), ("x", throughput)):
        bad = values[~(np.isfinite(values) & (values > 0.0))]
        if bad.size:
            raise ValueError(f"{name}: got {bad[0]}; every value must be positive and finite")
    return concurrency, throughput


def _described(
    p: FloatArray, coefficients: tuple[float, float, float], errors: tuple[float, float, float]
) -> UslFit:
    fit = UslFit(*coefficients, *errors)
    distinct = len(np.unique(p))
    if distinct < 3:
        reason = f"{distinct} distinct concurrencies cannot identify three coefficients; measure at least 3"
        return UslFit(*coefficients, *errors, identified=False, reason=reason)
    if fit.kappa > 0.0 and 0.5 * fit.kappa < fit.kappa_error < math.inf:
        reason = f"kappa {fit.kappa:.3g} is within two standard errors ({fit.kappa_error:.3g}) of 0"
        return UslFit(*coefficients, *errors, identified=False, reason=reason)
    highest = float(p.max())
    if highest < fit.p_star < math.inf:
        reason = f"p* {fit.p_star:.4g} is extrapolated: nothing was measured beyond {highest:.4g}"
        return UslFit(*coefficients, *errors, reason=reason)
    return fit
