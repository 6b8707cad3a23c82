"""What back pressure measured: throughput at each concurrency, and the fitted curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retrain.controllers.usl import UslFit, fit_usl
from retrain.report.columns import FloatArray
from retrain.report.gather import RunRecord
from retrain.report.series import Bins, Curve, counted
from retrain.report.sides import Side

MOST_POINTS = 400  # of a condition


@dataclass(frozen=True)
class Scalability:
    """One condition's throughput over concurrency.

    Attributes:
        concurrency: rollouts at a time, shape (steps,).
        throughput: tokens per second, shape (steps,).
        fit: the curve through all steps of all seeds, by the controller's own method.
        steered_p_star: median over seeds of the controller's last p*; None if half of them found no optimum.
    """

    condition: str
    concurrency: FloatArray
    throughput: FloatArray
    fit: UslFit
    steered_p_star: float | None


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps of a run in one regime."""

    run_id: str
    regime: str
    first: int
    last: int


def scalability(side: Side) -> Scalability | None:
    """Fit a condition's steps; None without back pressure."""
    runs = [run for run in counted(side.runs) or side.runs if any(run.columns.regimes)]
    p = np.concatenate([_concurrency(run) for run in runs] or [np.empty(0)])
    x = np.concatenate([run.columns.metric("tokens_per_second") for run in runs] or [np.empty(0)])
    measured = np.isfinite(p) & np.isfinite(x) & (p > 0) & (x > 0)
    p, x = p[measured], x[measured]
    if not len(p):
        return None
    steered = float(np.median([_last(run.columns.metric("bp_p_star")) for run in runs]))
    fit = fit_usl(p, x, method="online")
    return Scalability(side.label, p, x, fit, steered if math.isfinite(steered) else None)


def thinned(found: Scalability) -> tuple[FloatArray, FloatArray]:
    """Return at most `MOST_POINTS` points, evenly spaced over the steps."""
    keep = np.unique(np.linspace(0, len(found.concurrency) - 1, MOST_POINTS).astype(int))
    return found.concurrency[keep], found.throughput[keep]


def stretches(runs: Sequence[RunRecord]) -> tuple[Stretch, ...]:
    """Join the steps of each run that were in the same regime."""
    return tuple(stretch for run in runs for stretch in _stretches(run))


def best_concurrency(side: Side, bins: Bins) -> Curve | None:
    """Return the controller's p*: the median over all seeds and steps of a bin, NaN where it is infinite.

    Bins without a step of this condition are left out. A median, because a mean would be infinite as soon
    as one seed has no finite p*.
    """
    runs = [run for run in counted(side.runs) or side.runs if any(run.columns.regimes)]
    if not any(np.isfinite(run.columns.metric("bp_p_star")).any() for run in runs):
        return None
    steps = np.concatenate([run.columns.steps[_has_regime(run)] for run in runs])
    p_star = np.concatenate([run.columns.metric("bp_p_star")[_has_regime(run)] for run in runs])
    p_star[np.isnan(p_star)] = np.inf
    bin_of = (steps - 1) // bins.width
    places = [np.flatnonzero(bin_of == i) for i in np.unique(bin_of)]
    middle = np.array([np.median(p_star[at]) for at in places])
    centres = np.array([steps[at].mean() for at in places])
    nothing = np.full(len(places), np.nan)
    best = np.where(np.isfinite(middle), middle, np.nan)
    return Curve(side.label, centres, best, nothing, nothing, np.full(len(places), len(runs), float))


def _has_regime(run: RunRecord) -> NDArray[np.bool_]:
    return np.array([bool(regime) for regime in run.columns.regimes], dtype=bool)


def _stretches(run: RunRecord) -> list[Stretch]:
    found: list[Stretch] = []
    for step, regime in zip(run.columns.steps.tolist(), run.columns.regimes, strict=True):
        if found and found[-1].regime == regime and found[-1].last == step - 1:
            found[-1] = Stretch(run.run_id, regime, found[-1].first, step)
        else:
            found.append(Stretch(run.run_id, regime, step, step))
    return [stretch for stretch in found if stretch.regime]


def _concurrency(run: RunRecord) -> FloatArray:
    prompts, batch = run.columns.metric("prompts_at_a_time"), run.columns.metric("batch_size")
    return np.where(np.isfinite(prompts), prompts, batch) * run.columns.metric("group_size")


def _last(values: FloatArray) -> float:
    return float(values[-1]) if len(values) and np.isfinite(values[-1]) else math.inf
