"""The controller's fit of the scalability law: the time per step, p / X = lead + load p + crowd p^2.

Linear in its three coefficients, hence exact and cheap; relative errors, because noise is proportional to
throughput; non-negative, because no part of a step takes negative time (which keeps kappa <= sigma <= 1).
All seven subsets of coefficients are enumerated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from retrain.base.rollouts import Floats

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
        """The law's sigma, kappa and lambda."""
        total = self.lead + self.load + self.crowd
        return (self.load + self.crowd) / total, self.crowd / total, 1.0 / total

    def throughput(self, p: float) -> float:
        return p / (self.lead + self.load * p + self.crowd * p * p)


class StepTimeFitter:
    """Fit step times repeatedly at fixed concurrencies.

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
        lead, load, crowd = _non_negative([moments[row : row + 3] for row in range(3)], target)
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


def _non_negative(gram: list[list[float]], target: list[float]) -> tuple[float, float, float]:
    """Return the non-negative minimum: of all three coefficients if positive, else of a subset."""
    solutions = (_solved(gram, target, subset) for subset in SUBSETS)
    if (full := next(solutions)) is not None:
        return full
    best, best_gain = (0.0, 0.0, 0.0), 0.0
    for solution in filter(None, solutions):
        gain = sum(value * weight for value, weight in zip(solution, target, strict=True))
        if gain > best_gain * (1.0 + TIE):
            best, best_gain = solution, gain
    return best


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
            other[:] = [value - share * own for value, own in zip(other, row, strict=True)]
    value = [0.0, 0.0, 0.0]
    for k, i in enumerate(subset):
        value[i] = rows[k][-1] / rows[k][k]
    is_positive = min(value[i] for i in subset) > NEGLIGIBLE * max(value)
    return (value[0], value[1], value[2]) if is_positive else None
