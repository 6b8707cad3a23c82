"""Quantiles of Student's t distribution without scipy, for any degrees of freedom, and intervals of means.

The tail is a regularized incomplete beta function: a continued fraction (DLMF 8.17.22, by Lentz's method).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

NORMAL = NormalDist()
LARGE = 10_000.0  # degrees of freedom, from which the expansion around the normal quantile errs by 1e-9
LARGEST_EXPONENT = 700.0  # of a float
PRECISION = 1e-15
SMALL_STEP = 1e-8  # the error after a step is about its square
MOST_STEPS = 50  # a handful is usual


@lru_cache(maxsize=4096)  # the curves of a chart ask for the same at each step
def t_quantile(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t, of a probability in (0, 1); infinite beyond 1e150.

    Source: Newton's method in the logarithms of t and of its tail, in which the tail is concave; begun above
    the root by Wallace's approximation (1959). Beyond `LARGE`: Abramowitz and Stegun 26.7.5.
    """
    tail = min(probability, 1 - probability)
    sign, z = math.copysign(1, probability - 0.5), -NORMAL.inv_cdf(tail)
    if z == 0:
        return 0.0
    if freedom > LARGE:
        return sign * (z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2))
    exponent = (z * (8 * freedom + 3) / (8 * freedom + 1)) ** 2 / freedom
    if exponent > LARGEST_EXPONENT:
        return sign * math.inf
    t = math.sqrt(freedom * math.expm1(exponent))
    log_norm = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    for _ in range(MOST_STEPS):
        beyond = t_tail(t, freedom)
        density = math.exp(log_norm - (freedom + 1) / 2 * math.log1p(t * t / freedom))
        step = math.log(beyond / tail) * beyond / (t * density)
        t *= math.exp(step)
        if abs(step) < SMALL_STEP:
            break
    return sign * t


def t_tail(t: float, freedom: float) -> float:
    """Return the probability that Student's t exceeds a positive value."""
    within = t * t / (freedom + t * t)
    if within < 1 / (1 + freedom):  # where the other end's fraction converges faster
        return 0.5 - _beta(0.5, freedom / 2, within) / 2
    return _beta(freedom / 2, 0.5, freedom / (freedom + t * t)) / 2


def half_width(differences: Sequence[float], error: float) -> float:
    """Return half of Student's interval of a mean, which the error says how often it may miss."""
    quantile = t_quantile(error / 2, len(differences) - 1)
    return -quantile * statistics.stdev(differences) / math.sqrt(len(differences))


def _beta(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b)."""
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction, change, m = d, 0.0, 0
    while abs(change - 1) > PRECISION:
        m += 1
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            c, d = 1 + term / c, 1 / (1 + term * d)
            change = c * d
            fraction *= change
    return math.exp(log_front) * fraction / a
