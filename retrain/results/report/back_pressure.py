"""What back pressure measured and did: throughput at each concurrency, the fitted curve, and regimes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from retrain.base.rollouts import Floats
from retrain.control.rules.usl import UslFit, fit_usl
from retrain.results.report import charts as vl
from retrain.results.report.charts import Chart, Spec
from retrain.results.report.curves import counted
from retrain.results.report.gather import RunHistory
from retrain.results.report.sides import Side
from retrain.results.report.tables import Table, significant

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
    concurrency: Floats  # rollouts at a time, shape (steps,)
    throughput: Floats  # tokens per second, shape (steps,)
    fit: UslFit  # through all steps of all seeds, by the controller's own method
    steered_p_star: float | None  # median over seeds of the controller's last p*; None if half found none


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps of a run in one regime."""

    run: str  # its name
    regime: str
    first: int
    last: int


def scalability(side: Side) -> Scalability | None:
    """Fit a condition's steps, those of failed runs only if all failed; None without back pressure."""
    runs = [run for run in counted(side.runs) or side.runs if any(run.columns.text("bp_regime"))]
    if not runs:
        return None
    names = ("prompts_at_a_time", "batch_size", "group_size", "tokens_per_second")
    at_a_time, batch, group, x = (
        np.concatenate([run.columns.metric(name) for run in runs]) for name in names
    )
    p = np.where(np.isfinite(at_a_time), at_a_time, batch) * group
    measured = np.isfinite(p) & np.isfinite(x) & (p > 0) & (x > 0)
    p, x = p[measured], x[measured]
    if not len(p):
        return None
    last = [run.columns.metric("bp_p_star")[-1] for run in runs]
    steered = float(np.median([p_star if math.isfinite(p_star) else math.inf for p_star in last]))
    fit = fit_usl(p, x, method="online")
    return Scalability(side.label, p, x, fit, steered if math.isfinite(steered) else None)


def regime_stretches(runs: Sequence[RunHistory]) -> tuple[Stretch, ...]:
    """Join the steps of each run that were in the same regime."""
    stretches = []
    for run in runs:
        rows = enumerate(zip(run.columns.steps.tolist(), run.columns.text("bp_regime"), strict=True))
        for (regime, _), group in groupby(rows, key=lambda row: (row[1][1], row[1][0] - row[0])):
            steps = [step for _, (step, _) in group]
            if regime:
                stretches.append(Stretch(run.name, regime, steps[0], steps[-1]))
    return tuple(stretches)


def usl_chart(scalabilities: Sequence[Scalability], conditions: Sequence[str]) -> Chart:
    """Draw measured throughput, the fitted curves and their peaks."""
    x = vl.quantity("p", "concurrency p (rollouts at a time)", scale={"zero": True, "nice": True})
    y = vl.quantity("x", "throughput (sampled tokens per second)", scale={"zero": True})
    seen = vl.hints(c="condition", p=("concurrency", ",.0f"), x=("tokens per second", ",.0f"))
    dots = {"type": "point", "filled": True, "opacity": 0.35, "size": 24}
    line = {"type": "line", "strokeWidth": 2}
    rule = {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 1.5}
    measured, fitted, peaks = list[Spec](), list[Spec](), list[Spec]()
    for each in scalabilities:
        furthest = max(2.0, 1.15 * float(each.concurrency.max()))
        p = np.linspace(1, furthest, CURVE_POINTS)
        keep = np.unique(np.linspace(0, len(each.concurrency) - 1, MOST_POINTS).astype(int))  # evenly spaced
        measured += _points(each, each.concurrency[keep], each.throughput[keep])
        fitted += _points(each, p, np.asarray(each.fit.throughput(p)))
        if each.fit.p_star <= furthest:
            peaks += _points(each, np.array([each.fit.p_star]), np.array([each.fit.peak]))
    return vl.chart(
        "usl",
        "Throughput over concurrency, and the Universal Scalability Law fitted to it",
        "Dots: steps. Line: X(p) = λp / (1 + σ(p − 1) + κp(p − 1)). Dashed: its peak p*, if in range. "
        + " ".join(map(_parameters, scalabilities[:NAMED_FITS])),
        encoding=vl.by_condition(conditions, {each.condition for each in scalabilities}),
        layer=[
            vl.layer(measured, dots, zoom="xy", x=x, y=y, tooltip=seen),
            vl.layer(fitted, line, x=x, y=y),
            vl.layer(peaks, rule, x=x, tooltip=seen),
        ],
    )


def regime_chart(stretches: Sequence[Stretch], last_step: float) -> Chart:
    """Draw the regime of each run at each step."""
    runs = list(dict.fromkeys(stretch.run for stretch in stretches))
    shown = runs[:MOST_RUNS]
    rows = [
        {
            "r": stretch.run, "g": stretch.regime.replace("_", " "),
            "a": stretch.first - 1, "b": stretch.last,
        }
        for stretch in stretches
        if stretch.run in shown
    ]  # fmt: skip
    regimes = {stretch.regime for stretch in stretches}
    colours = {name: colour for name, colour in REGIMES.items() if name in regimes}
    colours |= dict.fromkeys(sorted(regimes - REGIMES.keys()), OTHER_REGIME)
    scale = {"domain": [name.replace("_", " ") for name in colours], "range": list(colours.values())}
    is_labelled = len(shown) <= LABELLED_RUNS
    left_out = f" The first {MOST_RUNS} runs." if len(shown) < len(runs) else ""
    return vl.chart(
        "regimes",
        "Regime of each step, run by run",
        "How back pressure classified each step." + left_out,
        height=max(60, (20 if is_labelled else 5) * len(shown)),
        **vl.layer(
            rows,
            {"type": "bar"},
            zoom="x",
            x=vl.quantity("a", "step", scale={"domain": [0, last_step], "nice": False}),
            x2={"field": "b"},
            y=vl.category("r", shown, labels=is_labelled),
            color={"field": "g", "type": "nominal", "scale": scale},
            tooltip=vl.hints(r="run", g="regime", a=("after step", "d"), b=("to step", "d")),
        ),
    )


def _points(each: Scalability, p: Floats, x: Floats) -> list[Spec]:
    rows = zip(p.tolist(), x.tolist(), strict=True)
    return [{"c": each.condition, "p": vl.rounded(p), "x": vl.rounded(x)} for p, x in rows]


def _parameters(each: Scalability) -> str:
    fit, doubt = each.fit, "" if each.fit.identified else " (not identified by these data)"
    peak = f"p* = {significant(fit.p_star)}" if math.isfinite(fit.p_star) else "no peak"
    return f"{each.condition}: σ = {significant(fit.sigma)}, κ = {significant(fit.kappa)}, {peak}{doubt}."


def fits(scalabilities: Sequence[Scalability]) -> Table:
    """Return one row per condition: the fitted Universal Scalability Law, with standard errors (se)."""
    laws = (">σ contention ± se", ">κ crosstalk ± se", ">λ tokens/s at p = 1 ± se")
    rows = [
        (
            each.condition,
            str(len(each.concurrency)),
            _with_error(each.fit.sigma, each.fit.sigma_error),
            _with_error(each.fit.kappa, each.fit.kappa_error),
            _with_error(each.fit.lambda_, each.fit.lambda_error),
            significant(each.fit.p_star) if math.isfinite(each.fit.p_star) else "no peak",
            significant(each.steered_p_star) if each.steered_p_star else "no peak",
        )
        for each in scalabilities
    ]
    return ("condition", ">steps", *laws, ">p*", ">p* of the controller"), rows


def _with_error(value: float, error: float) -> str:
    return f"{significant(value)} ± {significant(error)}" if math.isfinite(error) else significant(value)
