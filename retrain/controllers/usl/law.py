"""Universal Scalability Law: throughput as a function of concurrency, and its maximum.

X(p) = lambda p / (1 + sigma (p - 1) + kappa p (p - 1)), with lambda the throughput at p = 1, sigma the
contention (the share of work that queues), kappa the crosstalk (pairwise cost). Its maximum is at
p* = sqrt((1 - sigma) / kappa); without crosstalk there is none.

Source: Gunther, Guerrilla Capacity Planning (2007), chapters 4 to 6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Quantile:
    """A quantile of Student's t: of the normal distribution, and of 1 to 5 degrees of freedom."""

    normal: float
    few: tuple[float, float, float, float, float]

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
    """A fitted curve, with its uncertainty.

    Attributes:
        sigma: contention, in [0, 1].
        kappa: crosstalk, in [0, 1].
        lambda_: throughput at p = 1, in the unit of the data.
        sigma_error, kappa_error, lambda_error: standard errors; infinite where the data do not
            determine them.
        freedom: observations beyond the three coefficients.
        unbounded: sigma and kappa of the fit without bounds, the centres of their intervals; None if no
            bound is active.
        identified: whether the data determine the curve in the measured range, and whether it has an
            optimum there.
        reason: why they do not, or a caveat; else empty.
    """

    sigma: float
    kappa: float
    lambda_: float
    sigma_error: float = math.inf
    kappa_error: float = math.inf
    lambda_error: float = math.inf
    freedom: int = 0
    unbounded: tuple[float, float] | None = None
    identified: bool = True
    reason: str = ""

    @property
    def quantile(self) -> float:
        """Half width of a 95 % interval of an unbounded coefficient, in standard errors (Student's t)."""
        return MIDDLE.of(self.freedom)

    @property
    def has_crosstalk(self) -> bool:
        """Whether kappa is significantly above 0; false positives in 2.5 % of data sets."""
        kappa = self.unbounded[1] if self.unbounded else self.kappa
        return kappa > _times(self.quantile, self.kappa_error)

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % intervals of sigma, kappa and lambda, within their bounds."""
        sigma, kappa = self.unbounded or (self.sigma, self.kappa)
        return {
            "sigma": self._within_bounds(sigma, self.sigma_error),
            "kappa": self._within_bounds(kappa, self.kappa_error),
            "lambda": (
                max(0.0, self.lambda_ - _times(MIDDLE.of(self.freedom), self.lambda_error)),
                self.lambda_ + _times(MIDDLE.of(self.freedom), self.lambda_error),
            ),
        }

    def _within_bounds(self, centre: float, error: float) -> tuple[float, float]:
        low = centre - _times(BELOW.of(self.freedom), error)
        high = max(centre, 0.0) + _times(ABOVE.of(self.freedom), error)
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
    def throughput(self, p: FloatArray) -> FloatArray: ...
    def throughput(self, p: float | FloatArray) -> float | FloatArray:
        """Return the predicted throughput at concurrency `p` (any shape)."""
        return self.lambda_ * (p / (1.0 + self.sigma * (p - 1.0) + self.kappa * p * (p - 1.0)))


def _times(quantile: float, error: float) -> float:
    return quantile * error if error > 0.0 else 0.0
