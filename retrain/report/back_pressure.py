"""What back pressure measured and did: throughput at each concurrency, the fitted curve, and regimes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from retrain.controllers.usl import UslFit, fit_usl
from retrain.report.charts import Chart, Spec, by_condition, category, chart, hints, layer, quantity, zoom
from retrain.report.columns import FloatArray, rounded
from retrain.report.gather import RunHistory
from retrain.report.series import Bins, Curve, counted
from retrain.report.sides import Side
from retrain.report.wording import significant

MOST_POINTS = 400  # of a condition
REGIMES = {
    "warmup": "#BBBBBB",
    "compute_bound": "#E69F00",
    "optimal": "#009E73",
    "memory_bound": "#CC79A7",
    "retrograde": "#D55E00",
}
OTHER_REGIME = "#56B4E9"
CURVE_POINTS = 80
LABELLED_RUNS = 40
MOST_RUNS = 200
NAMED_FITS = 4  # in the subtitle


@dataclass(frozen=True)
class Scalability:
    """One condition's throughput over concurrency."""

    condition: str
    concurrency: FloatArray  # rollouts at a time, shape (steps,)
    throughput: FloatArray  # tokens per second, shape (steps,)
    fit: UslFit  # through all steps of all seeds, by the controller's own method
    steered_p_star: float | None  # median over seeds of the controller's last p*; None if half found none


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps of a run in one regime."""

    run_id: str
    regime: str
    first: int
    last: int


def scalability(side: Side) -> Scalability | None:
    """Fit a condition's steps; None without back pressure."""
    runs = _steered(side)
    if not runs:
        return None
    p = np.concatenate([_concurrency(run) for run in runs])
    x = np.concatenate([run.columns.metric("tokens_per_second") for run in runs])
    measured = np.isfinite(p) & np.isfinite(x) & (p > 0) & (x > 0)
    p, x = p[measured], x[measured]
    if not len(p):
        return None
    last = [run.columns.metric("bp_p_star")[-1] for run in runs]
    steered = float(np.median([p_star if math.isfinite(p_star) else math.inf for p_star in last]))
    fit = fit_usl(p, x, method="online")
    return Scalability(side.label, p, x, fit, steered if math.isfinite(steered) else None)


def stretches(runs: Sequence[RunHistory]) -> tuple[Stretch, ...]:
    """Join the steps of each run that were in the same regime."""
    return tuple(stretch for run in runs for stretch in _stretches(run))


def best_concurrency(side: Side, bins: Bins) -> Curve | None:
    """Return the controller's p*: the median over all seeds and steps of a bin, NaN where it is infinite.

    Bins without a step of this condition are left out. A median, because a mean would be infinite as soon
    as one seed has no finite p*.
    """
    runs = _steered(side)
    if not any(np.isfinite(run.columns.metric("bp_p_star")).any() for run in runs):
        return None
    classified = [np.array(run.columns.regimes, dtype=str) != "" for run in runs]
    steps = np.concatenate([run.columns.steps[at] for run, at in zip(runs, classified, strict=True)])
    found = [run.columns.metric("bp_p_star")[at] for run, at in zip(runs, classified, strict=True)]
    p_star = np.nan_to_num(np.concatenate(found), nan=np.inf, posinf=np.inf)
    bin_of = (steps - 1) // bins.width
    places = [np.flatnonzero(bin_of == i) for i in np.unique(bin_of)]
    middle = np.array([np.median(p_star[at]) for at in places])
    centres = np.array([steps[at].mean() for at in places])
    nothing = np.full(len(places), np.nan)
    best = np.where(np.isfinite(middle), middle, np.nan)
    return Curve(side.label, centres, best, nothing, nothing, np.full(len(places), len(runs), float))


def _steered(side: Side) -> list[RunHistory]:
    """Return the runs with back pressure; those that failed only if all did."""
    return [run for run in counted(side.runs) or side.runs if any(run.columns.regimes)]


def _stretches(run: RunHistory) -> Iterator[Stretch]:
    rows = enumerate(zip(run.columns.steps.tolist(), run.columns.regimes, strict=True))
    for (regime, _), group in groupby(rows, key=lambda row: (row[1][1], row[1][0] - row[0])):
        steps = [step for _, (step, _) in group]
        if regime:
            yield Stretch(run.run_id, regime, steps[0], steps[-1])


def _concurrency(run: RunHistory) -> FloatArray:
    prompts, batch = run.columns.metric("prompts_at_a_time"), run.columns.metric("batch_size")
    return np.where(np.isfinite(prompts), prompts, batch) * run.columns.metric("group_size")


def usl_chart(found: Sequence[Scalability], conditions: Sequence[str]) -> Chart:
    """Draw measured throughput, the fitted curves and their peaks."""
    x = quantity("p", "concurrency p (rollouts at a time)", scale={"zero": True, "nice": True})
    y = quantity("x", "throughput (sampled tokens per second)", scale={"zero": True})
    seen = hints(("c", "condition", ""), ("p", "concurrency", ",.0f"), ("x", "tokens per second", ",.0f"))
    dots = {"type": "point", "filled": True, "opacity": 0.35, "size": 24}
    line = {"type": "line", "strokeWidth": 2}
    rule = {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 1.5}
    measured = [row for one in found for row in _measured(one)]
    return chart(
        "usl",
        "Throughput over concurrency, and the Universal Scalability Law fitted to it",
        "Dots: steps. Line: X(p) = λp / (1 + σ(p − 1) + κp(p − 1)). Dashed: its peak p*, if in range. "
        + " ".join(map(_parameters, found[:NAMED_FITS])),
        encoding=by_condition(conditions, {one.condition for one in found}),
        layer=[
            layer(measured, dots, params=[zoom("x", "y")], encoding={"x": x, "y": y, "tooltip": seen}),
            layer([row for one in found for row in _curve(one)], line, encoding={"x": x, "y": y}),
            layer([row for one in found for row in _peak(one)], rule, encoding={"x": x, "tooltip": seen}),
        ],
    )


def regime_chart(stretches: Sequence[Stretch], last_step: int) -> Chart:
    """Draw the regime of each run at each step."""
    runs = list(dict.fromkeys(stretch.run_id for stretch in stretches))
    shown = runs[:MOST_RUNS]
    rows = [
        {"r": one.run_id, "g": one.regime.replace("_", " "), "a": one.first - 1, "b": one.last}
        for one in stretches
        if one.run_id in shown
    ]
    found = {one.regime for one in stretches}
    regimes = [name for name in REGIMES if name in found] + sorted(found - REGIMES.keys())
    colours = {
        "domain": [name.replace("_", " ") for name in regimes],
        "range": [REGIMES.get(name, OTHER_REGIME) for name in regimes],
    }
    is_labelled = len(shown) <= LABELLED_RUNS
    left_out = f" The first {MOST_RUNS} runs." if len(shown) < len(runs) else ""
    seen = hints(("r", "run", ""), ("g", "regime", ""), ("a", "after step", "d"), ("b", "to step", "d"))
    return chart(
        "regimes",
        "Regime of each step, run by run",
        "How back pressure classified each step." + left_out,
        height=max(60, (20 if is_labelled else 5) * len(shown)),
        data={"values": rows},
        mark={"type": "bar"},
        params=[zoom("x")],
        encoding={
            "x": quantity("a", "step", scale={"domain": [0, last_step], "nice": False}),
            "x2": {"field": "b"},
            "y": category("r", shown, labels=is_labelled),
            "color": {"field": "g", "type": "nominal", "scale": colours},
            "tooltip": seen,
        },
    )


def _measured(one: Scalability) -> list[Spec]:
    """Return at most `MOST_POINTS` points, evenly spaced over the steps."""
    keep = np.unique(np.linspace(0, len(one.concurrency) - 1, MOST_POINTS).astype(int))
    return _rows(one, one.concurrency[keep], one.throughput[keep])


def _curve(one: Scalability) -> list[Spec]:
    p = np.linspace(1, _furthest(one), CURVE_POINTS)
    return _rows(one, p, np.asarray(one.fit.throughput(p)))


def _peak(one: Scalability) -> list[Spec]:
    if not one.fit.p_star <= _furthest(one):
        return []
    return _rows(one, np.array([one.fit.p_star]), np.array([one.fit.peak]))


def _rows(one: Scalability, p: FloatArray, x: FloatArray) -> list[Spec]:
    points = zip(p.tolist(), x.tolist(), strict=True)
    return [{"c": one.condition, "p": rounded(p), "x": rounded(x)} for p, x in points]


def _furthest(one: Scalability) -> float:
    return max(2.0, 1.15 * float(one.concurrency.max()))


def _parameters(one: Scalability) -> str:
    fit = one.fit
    peak = f"p* = {significant(fit.p_star)}" if math.isfinite(fit.p_star) else "no peak"
    doubt = "" if fit.identified else " (not identified by these data)"
    return f"{one.condition}: σ = {significant(fit.sigma)}, κ = {significant(fit.kappa)}, {peak}{doubt}."
