"""Curves of a metric over steps: per condition the mean over seeds, with the seeds or a band.

Steps are grouped into equal bins and averaged per run, so each seed counts once per bin. Failed runs are in
no mean, which would jump where they end; a condition without other runs shows them one by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from retrain.base.rollouts import Floats
from retrain.results.report.gather import RunHistory
from retrain.results.report.sides import Side
from retrain.results.report.statistics import FEWEST_SEEDS, half_width

MOST_POINTS = 100  # of a curve: more would be noise, fewer would hide bends
FEWEST_POINTS = 20
MOST_SEEDS_DRAWN = 5  # as separate lines; with so few, an interval is less informative than the seeds
BOUNDED = ("reward", "_rate", "_fraction")  # metrics bounded by 1 if no value exceeds it
NUMBERS = 400_000  # of all curves of a page: about 3 MB


@dataclass(frozen=True)
class Curve:
    """One condition's metric over steps; arrays have the shape (points,) if nothing else is said."""

    condition: str
    steps: Floats  # mean step of each bin that has values
    mean: Floats  # over seeds; NaN if all runs failed
    low: Floats  # 95 % t interval of the mean; NaN if there are at most `MOST_SEEDS_DRAWN` runs
    high: Floats
    seeds: Floats  # their number
    each: Floats = field(default_factory=lambda: np.empty((0, 0)))  # (runs, points), or empty
    is_cut: bool = False  # whether the interval was clipped to the range of the metric


@dataclass(frozen=True)
class Bins:
    """Equal bins of steps, the same for all curves of a page."""

    width: int
    count: int
    last_step: int  # of the longest run


@dataclass(frozen=True)
class Shown:
    """The conditions that charts show, and the bins of their curves."""

    sides: tuple[Side, ...]
    bins: Bins

    @property
    def labels(self) -> tuple[str, ...]:
        """Their names, in the order that gives them their colours."""
        return tuple(side.label for side in self.sides)


def bins_for(sides: Sequence[Side], metrics: int) -> Bins:
    """Choose bins that keep all curves of all metrics together small enough."""
    longest = max((run.last_step for side in sides for run in side.runs), default=0)
    numbers = sum(2 + max(2, _drawn(len(side.runs))) for side in sides)  # of a point: step, mean and others
    room = NUMBERS // max(1, metrics * numbers)
    points = min(max(room, FEWEST_POINTS), MOST_POINTS)
    width = max(1, -(-longest // points))
    return Bins(width, -(-longest // width), longest)


def curve(side: Side, metric: str, bins: Bins) -> Curve:
    """Return a metric's curve of a condition."""
    runs = counted(side.runs)
    binned = [_binned(run, metric, bins) for run in runs or side.runs]
    values = np.array([one[0] for one in binned]).reshape(len(binned), bins.count)
    steps = np.array([one[1] for one in binned]).reshape(len(binned), bins.count)
    seeds = np.isfinite(values).sum(axis=0)
    known = seeds > 0
    values, steps, seeds = values[:, known], steps[:, known], seeds[known]
    if not len(seeds):
        return Curve(side.label, *(np.empty(0),) * 5)
    mean, half = np.nanmean(values, axis=0), _half_width(values, seeds)
    if not runs:
        mean, half = np.full((2, len(seeds)), np.nan)
    drawn = _drawn(len(values)) if runs else MOST_SEEDS_DRAWN
    limits = range_of(metric, float(np.nanmin(values)), float(np.nanmax(values)))
    low, high = np.clip(mean - half, *limits), np.clip(mean + half, *limits)
    return Curve(
        side.label,
        np.nanmean(steps, axis=0),
        mean,
        low,
        high,
        seeds.astype(float),
        each=values[:drawn],
        is_cut=bool((low > mean - half).any() or (high < mean + half).any()),
    )


def _drawn(runs: int) -> int:
    """Return how many runs of a condition are drawn one by one."""
    return runs if 1 < runs <= MOST_SEEDS_DRAWN else 0


def range_of(metric: str, least: float, most: float) -> tuple[float, float]:
    """Return the range of a metric: from 0 if no value is negative, to 1 for fractions and rewards."""
    is_bounded = most <= 1 and ("pass_at_" in metric or metric.endswith(BOUNDED))
    return 0.0 if least >= 0 else -np.inf, 1.0 if is_bounded else np.inf


def curves(sides: Sequence[Side], metric: str, bins: Bins) -> tuple[Curve, ...]:
    """Return the curves of the conditions that have the metric."""
    found = (curve(side, metric, bins) for side in sides)
    return tuple(one for one in found if len(one.steps))


def counted(runs: Sequence[RunHistory]) -> Sequence[RunHistory]:
    """Exclude runs that failed."""
    return [run for run in runs if not run.has_failed]


def _binned(run: RunHistory, metric: str, bins: Bins) -> tuple[Floats, Floats]:
    values = run.columns.metric(metric)
    known = np.isfinite(values) & (run.columns.steps > 0)
    at = (run.columns.steps[known] - 1) // bins.width
    hits = np.bincount(at, minlength=bins.count).astype(float)[: bins.count]
    hits[hits == 0] = np.nan
    sums = np.bincount(at, values[known], bins.count)
    steps = np.bincount(at, run.columns.steps[known].astype(float), bins.count)
    return sums / hits, steps / hits


def _half_width(values: Floats, seeds: Floats) -> Floats:
    enough = (seeds >= FEWEST_SEEDS) & (len(values) > MOST_SEEDS_DRAWN)
    half = np.full(len(seeds), np.nan)
    if enough.any():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # overflow of absurd values gives infinity
            spread = np.nanstd(values[:, enough], axis=0, ddof=1)
        half[enough] = half_width(spread, seeds[enough])
    return half
