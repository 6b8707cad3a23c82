"""Universal Scalability Law: what throughput a level of concurrency buys, and where it is best.

X(p) = lambda p / (1 + sigma (p - 1) + kappa p (p - 1)), with lambda the throughput at p = 1, sigma the
contention (the share of work that queues), kappa the crosstalk (pairwise cost). Its maximum lies at
p* = sqrt((1 - sigma) / kappa); without crosstalk there is none. Nothing here decides what to do about it.

Source: Gunther, Guerrilla Capacity Planning (2007), chapters 4 to 6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

FEW = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706)  # 97.5 % quantiles of Student's t, 1 to 5 degrees of freedom


@dataclass(frozen=True)
class UslFit:
    """A fitted curve, with how far to trust it.

    Attributes:
        sigma: contention, in [0, 1].
        kappa: crosstalk, in [0, 1].
        lambda_: throughput at p = 1, in the unit of the data.
        sigma_error, kappa_error, lambda_error: standard errors, one-sided for a coefficient on its bound;
            infinite where the data say nothing of them.
        freedom: observations beyond the coefficients that they determine.
        identified: whether the data determine the curve where they were measured, and whether it has an
            optimum there.
        reason: why they do not, or what to bear in mind; empty when there is nothing to say.
    """

    sigma: float
    kappa: float
    lambda_: float
    sigma_error: float = math.inf
    kappa_error: float = math.inf
    lambda_error: float = math.inf
    freedom: int = 0
    identified: bool = True
    reason: str = ""

    @property
    def quantile(self) -> float:
        """Standard errors on either side of a coefficient that hold it with 95 % (Student's t)."""
        if self.freedom < 1:
            return math.inf
        if self.freedom <= len(FEW):
            return FEW[self.freedom - 1]
        z, n = 1.959964, self.freedom  # Abramowitz and Stegun, 26.7.5
        second, third = 5 * z**5 + 16 * z**3 + 3 * z, 3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z
        return z + (z**3 + z) / (4 * n) + second / (96 * n**2) + third / (384 * n**3)

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """What holds sigma, kappa and lambda with 95 %, within their bounds."""

        def around(value: float, error: float, highest: float) -> tuple[float, float]:
            wide = self.quantile * error if error > 0.0 else 0.0
            return max(0.0, value - wide), min(highest, value + wide)

        return {
            "sigma": around(self.sigma, self.sigma_error, 1.0),
            "kappa": around(self.kappa, self.kappa_error, 1.0),
            "lambda": around(self.lambda_, self.lambda_error, math.inf),
        }

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
        return self.lambda_ * (p / (1.0 + self.sigma * (p - 1.0) + self.kappa * p * (p - 1.0)))
