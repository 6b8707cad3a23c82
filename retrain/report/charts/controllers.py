"""Charts of back pressure: throughput over concurrency, and regimes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from retrain.report.charts.look import Chart, Spec, by_condition, chart, hints, quantity, zoom
from retrain.report.numbers import rounded, significant
from retrain.report.scalability import Scalability, Stretch, thinned

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


def usl_chart(found: Sequence[Scalability], conditions: Sequence[str]) -> Chart:
    """Draw measured throughput, the fitted curves and their peaks."""
    x = quantity("p", "concurrency p (rollouts at a time)", scale={"zero": True, "nice": True})
    y = quantity("x", "throughput (sampled tokens per second)", scale={"zero": True})
    seen = hints(("c", "condition", ""), ("p", "concurrency", ",.0f"), ("x", "tokens per second", ",.0f"))
    dots: Spec = {"type": "point", "filled": True, "opacity": 0.35, "size": 24}
    layers: list[Spec] = [
        {
            "data": {"values": [row for one in found for row in _measured(one)]},
            "mark": dots,
            "params": [zoom("x", "y")],
            "encoding": {"x": x, "y": y, "tooltip": seen},
        },
        {
            "data": {"values": [row for one in found for row in _curve(one)]},
            "mark": {"type": "line", "strokeWidth": 2},
            "encoding": {"x": x, "y": y},
        },
    ]
    if peaks := [row for one in found for row in _peak(one)]:
        rule = {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 1.5}
        layers.append({"data": {"values": peaks}, "mark": rule, "encoding": {"x": x, "tooltip": seen}})
    parameters = " ".join(map(_parameters, found[:NAMED_FITS]))
    return chart(
        "usl",
        "Throughput over concurrency, and the Universal Scalability Law fitted to it",
        "Dots: steps. Line: X(p) = λp / (1 + σ(p − 1) + κp(p − 1)). Dashed: its peak p*, if in range. "
        + parameters,
        encoding=by_condition(conditions, {one.condition for one in found}),
        layer=layers,
    )


def regime_chart(stretches: Sequence[Stretch], last_step: int) -> Chart:
    """Draw the regime of each run at each step."""
    runs = list(dict.fromkeys(stretch.run_id for stretch in stretches))[:MOST_RUNS]
    shown = set(runs)
    rows = [
        {"r": one.run_id, "g": one.regime.replace("_", " "), "a": one.first - 1, "b": one.last}
        for one in stretches
        if one.run_id in shown
    ]
    is_labelled = len(runs) <= LABELLED_RUNS
    left_out = "" if len(shown) == len({one.run_id for one in stretches}) else f" The first {MOST_RUNS} runs."
    y: Spec = {"field": "r", "type": "nominal", "sort": runs, "title": None}
    y["axis"] = {"labels": is_labelled, "ticks": False, "domain": False, "grid": False}
    seen = hints(("r", "run", ""), ("g", "regime", ""), ("a", "after step", "d"), ("b", "to step", "d"))
    return chart(
        "regimes",
        "Regime of each step, run by run",
        "How back pressure classified each step." + left_out,
        height=max(60, (20 if is_labelled else 5) * len(runs)),
        data={"values": rows},
        mark={"type": "bar"},
        params=[zoom("x")],
        encoding={
            "x": quantity("a", "step", scale={"domain": [0, last_step], "nice": False}),
            "x2": {"field": "b"},
            "y": y,
            "color": {"field": "g", "type": "nominal", "scale": _regime_colours(stretches)},
            "tooltip": seen,
        },
    )


def _regime_colours(stretches: Sequence[Stretch]) -> Spec:
    """Return the scale of the regimes that occur, in the order of `REGIMES`."""
    found = {one.regime for one in stretches}
    names = [name for name in REGIMES if name in found] + sorted(found - REGIMES.keys())
    return {
        "domain": [name.replace("_", " ") for name in names],
        "range": [REGIMES.get(name, OTHER_REGIME) for name in names],
    }


def _measured(one: Scalability) -> list[Spec]:
    points = zip(*thinned(one), strict=True)
    return [{"c": one.condition, "p": rounded(p), "x": rounded(x)} for p, x in points]


def _peak(one: Scalability) -> list[Spec]:
    if not one.fit.p_star <= _furthest(one):
        return []
    return [{"c": one.condition, "p": rounded(one.fit.p_star), "x": rounded(one.fit.peak)}]


def _curve(one: Scalability) -> list[Spec]:
    p = np.linspace(1, _furthest(one), CURVE_POINTS)
    return [
        {"c": one.condition, "p": rounded(at), "x": rounded(x)}
        for at, x in zip(p.tolist(), np.asarray(one.fit.throughput(p)).tolist(), strict=True)
    ]


def _furthest(one: Scalability) -> float:
    return max(2.0, 1.15 * float(one.concurrency.max()))


def _parameters(one: Scalability) -> str:
    fit = one.fit
    peak = f"p* = {significant(fit.p_star)}" if math.isfinite(fit.p_star) else "no peak"
    doubt = "" if fit.identified else " (not identified by these data)"
    return f"{one.condition}: σ = {significant(fit.sigma)}, κ = {significant(fit.kappa)}, {peak}{doubt}."
