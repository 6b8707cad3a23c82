"""Tests whether two conditions differ, with a few seeds each.

The decision is Student's: paired t where seeds match, Welch's t where they do not. With the few seeds that
people can afford, bootstrap intervals are far too narrow: of two identical conditions with three or five
seeds each they separate 14 to 28 % at the 95 % level, a t interval 2 to 6 %
(`benchmarks/studies/compare_aa.py`). The bootstrap (BCa) is reported too, as the field expects, but does not
decide. Where all differences are equal a t statistic is infinite; then the count of all permutations decides.

Sources: Welch 1947, doi:10.1093/biomet/34.1-2.28; Efron 1987, doi:10.1080/01621459.1987.10478410 (BCa);
Agarwal et al. 2021, arXiv:2108.13264 (interquartile mean, probability of improvement); Colas et al. 2018,
arXiv:1806.08295 (seeds, power and levels in RL).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrain.base.rollouts import Floats
from retrain.control.rules.sequential import ROUNDING
from retrain.control.rules.student import NORMAL, t_quantile, t_tail

LEVEL = 0.95
POWER = 0.8  # the customary probability of detecting a true difference
FEWEST_SEEDS = 3  # the spread of two may be off by any factor
RESAMPLES = 9999
TRIMMED = 0.25  # at each end: the interquartile mean
RESAMPLED_VALUES = 10**6  # in memory at a time: 20 MB with their places
SMALLEST = 1e-100  # a spread below it has no square


@dataclass(frozen=True)
class SeedSummary:
    """The values of one condition's seeds, summarized."""

    n: int
    mean: float | None
    std: float | None  # sample standard deviation; None below two seeds
    iqm: float | None  # interquartile mean
    low: float | None  # t interval of the mean; None below three seeds
    high: float | None


@dataclass(frozen=True)
class Difference:
    """Second condition minus first, over seeds."""

    n: int | None  # pairs; None if unpaired
    difference: float | None  # of the means; of the pairs' means if paired
    low: float | None  # 95 % t interval; None with too few seeds or without spread
    high: float | None
    p: float | None  # two-sided p-value that goes with it
    bootstrap_low: float | None  # 95 % BCa bootstrap interval; None if undefined
    bootstrap_high: float | None
    iqm_difference: float | None  # of the interquartile means over all seeds
    improvement: float | None  # probability that a run of the second scores above one of the first, ties half
    detectable: float | None  # what as many seeds with this spread would detect with 80 % power


def describe_sample(values: Sequence[float]) -> SeedSummary:
    """Summarize one condition."""
    x = np.asarray(values, dtype=float)
    if not len(x):
        return SeedSummary(0, None, None, None, None, None)
    mean, std = float(x.mean()), float(x.std(ddof=1)) if len(x) > 1 else None
    low = high = None
    if std is not None and len(x) >= FEWEST_SEEDS:
        half = float(half_width(std, len(x)))
        low, high = mean - half, mean + half
    return SeedSummary(len(x), mean, std, interquartile_mean(x), low, high)


def half_width(std: float | Floats, n: int | Floats) -> Any:
    """Return half the width of Student's interval of a mean of `n` values with this sample deviation."""
    return np.vectorize(t_quantile)((1 + LEVEL) / 2, np.asarray(n) - 1) * std / np.sqrt(n)


def difference_of(
    first: Mapping[int, float], second: Mapping[int, float], *, paired: bool = True, of_few: bool = False
) -> Difference:
    """Compare two conditions (seed -> value), seed by seed if `paired` and most seeds are in both.

    With `of_few`, a few seeds in both suffice, as where one condition was given more.
    """
    a, b = (np.array(list(side.values()), dtype=float) for side in (first, second))
    a, b = (_rounded(x, np.abs(x).max(initial=0)) for x in (a, b))
    if not len(a) or not len(b):
        return Difference(None, *(None,) * 9)
    gap = interquartile_mean(b) - interquartile_mean(a)
    ordered = np.sort(a)
    below = np.searchsorted(ordered, b, "left").sum() + np.searchsorted(ordered, b, "right").sum()
    improvement = float(below / 2 / len(a) / len(b))
    seeds = sorted(first.keys() & second.keys())
    if paired and (2 * len(seeds) > max(len(a), len(b)) or (of_few and len(seeds) >= FEWEST_SEEDS)):
        gains = np.array([second[seed] - first[seed] for seed in seeds], dtype=float)
        gains = _rounded(gains, np.abs([*a, *b]).max())
        return Difference(len(seeds), *_tested(gains), gap, improvement, _detectable(gains))
    return Difference(None, *_tested(b, a), gap, improvement, _detectable(a, b))


def interquartile_mean(x: Floats) -> float:
    """Return the mean of the middle half: of four values the middle two, of fewer all."""
    cut = int(TRIMMED * len(x))
    return float(np.sort(x)[cut : len(x) - cut].mean())


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values adjusted so that the family-wise error rate stays at the level.

    Source: Holm 1979, Scandinavian Journal of Statistics 6, 65-70.
    """
    order = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, i) in enumerate(order):
        highest = max(highest, min(1.0, p * (len(order) - rank)))
        adjusted[i] = highest
    return adjusted


Interval = tuple[float | None, float | None, float | None, float | None, float | None, float | None]


def _tested(*samples: Floats) -> Interval:
    """Test the gains of pairs, or two conditions: difference, t interval, p-value and bootstrap interval."""
    gap, sizes = float(_gap(*samples)), list(map(len, samples))
    if min(sizes) < FEWEST_SEEDS:
        return gap, None, None, None, None, None
    if all(map(_is_constant, samples)):
        if not gap:
            return 0.0, 0.0, 0.0, 1.0, None, None
        permutations = math.comb(sum(sizes), sizes[0]) if len(sizes) > 1 else 2 ** sizes[0]
        return gap, None, None, 2 / permutations, None, None  # none is further apart, on either side
    error, freedom = _standard_error(samples)
    half = error * t_quantile((1 + LEVEL) / 2, freedom)
    p = 2 * t_tail(abs(gap) / error, freedom) if gap else 1.0
    return gap, gap - half, gap + half, p, *_bootstrap(samples)


def _standard_error(samples: tuple[Floats, ...]) -> tuple[float, float]:
    """Return the standard error of a mean, or of a difference of two, and Welch's degrees of freedom."""
    parts = np.array([x.var(ddof=1) / len(x) for x in samples])
    degrees = np.array([len(x) - 1 for x in samples])
    return math.sqrt(parts.sum()), 1 / float(np.sum((parts / parts.sum()) ** 2 / degrees))


def _bootstrap(samples: tuple[Floats, ...]) -> tuple[float | None, float | None]:
    """Return the BCa interval of a mean, or of a difference of two."""
    rng, gap, drawn = np.random.default_rng(0), _gap(*samples), []
    batch = max(1, RESAMPLED_VALUES // max(map(len, samples)))
    for begin in range(0, RESAMPLES, batch):
        count = min(batch, RESAMPLES - begin)
        drawn.append(_gap(*(x[rng.integers(0, len(x), (count, len(x)))] for x in samples)))
    gaps = np.concatenate(drawn)
    below = float(np.mean(gaps < gap) + np.mean(gaps <= gap)) / 2
    if not 0 < below < 1:
        return None, None
    bias = NORMAL.inv_cdf(below)
    signs = (1, -1)  # of the samples in the difference, in closed form what a jackknife gives
    off = [sign * (x - x.mean()) for sign, x in zip(signs, samples, strict=False)]
    cubes = math.fsum(float(np.sum(x**3)) / len(x) ** 3 for x in off)
    squares = math.fsum(float(np.sum(x**2)) / len(x) ** 2 for x in off)
    skew = cubes / (6 * squares**1.5)
    edges = (bias + NORMAL.inv_cdf((1 + side * LEVEL) / 2) for side in (-1, 1))
    levels = [NORMAL.cdf(bias + edge / (1 - skew * edge)) for edge in edges]
    low, high = map(float, np.quantile(gaps, levels))
    return low, high


def _detectable(*samples: Floats) -> float | None:
    """Return the smallest true difference detected with the customary power, given the measured spreads."""
    if min(map(len, samples)) < FEWEST_SEEDS or all(map(_is_constant, samples)):
        return None
    error, freedom = _standard_error(samples)
    return error * (t_quantile((1 + LEVEL) / 2, freedom) + t_quantile(POWER, freedom))


def _rounded(x: Floats, size: float) -> Floats:
    """Remove differences that are only rounding errors at this magnitude."""
    resolution = max(ROUNDING * size, SMALLEST)
    if not len(x) or np.ptp(x) > resolution:
        return x
    return np.full_like(x, 0.0 if abs(x[0]) <= resolution else x[0])


def _is_constant(x: Floats) -> bool:
    return bool(np.all(x == x[0]))


def _gap(first: Floats, *second: Floats) -> Floats:
    """Return the mean along the last axis, or the difference of two."""
    return np.asarray(np.mean(first, axis=-1) - sum(np.mean(other, axis=-1) for other in second))
