"""A metric over steps, one line a condition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retrain.report.charts.look import HEIGHT, Chart, Spec, by_condition, chart, hints, quantity, zoom
from retrain.report.numbers import rounded
from retrain.report.series import Bins, Curve

NAMES = {
    "mean_reward": "mean reward",
    "eval_reward": "held-out reward",
    "tokens_per_second": "tokens per second",
    "tokens_per_step": "tokens per step",
    "rate_ratio": "samples per batch over target",
    "rate_sample_age_mean": "mean age (policy versions)",
    "bp_p_star": "p* (rollouts at a time)",
    "batch_size": "batch size (prompts)",
    "warm_up_loss": "loss (nats per token)",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "entropy": "entropy (nats per token)",
}
MARKED_POINTS = 40  # so few are drawn as dots too
OVERSHOOT = 0.12  # of the means' range: a band may leave the chart beyond it
NARROWEST = 0.002  # of the values' size: numbers are drawn with four digits, and an axis needs some between
BAND = "Band: its 95 % confidence interval (Student's t)."
NO_BAND = "No band: a confidence interval needs at least three seeds."


def axis_title(metric: str) -> str:
    """Name a metric with its unit."""
    if metric in NAMES:
        return NAMES[metric]
    name, unit = (metric.removesuffix("_s"), " (s)") if metric.endswith("_s") else (metric, "")
    return name.replace("_", " ") + unit


@dataclass(frozen=True)
class Plot:
    """What is drawn and how it is named.

    Attributes:
        name: of the chart's file.
        metric: names the y axis.
        target: a value to compare with, drawn as a dashed line.
        most: the y axis ends here at the latest.
    """

    name: str
    metric: str
    title: str
    subtitle: str
    height: int = HEIGHT
    target: float | None = None
    most: float = math.inf
    last_step: int | None = None


def curve_chart(
    plot: Plot, found: Sequence[Curve], conditions: Sequence[str], *, is_all: bool = False
) -> Chart:
    """Draw a metric's curves; the legend names their conditions, or all."""
    listed = None if is_all else {one.condition for one in found}
    label = axis_title(plot.metric)
    low, high = domain(found, plot.target)
    limits = [low, max(low, min(high, plot.most))]
    shared: Spec = {
        "x": quantity("s", "step", scale=_steps(plot.last_step)),
        **by_condition(conditions, listed, dashed=True),
    }
    return chart(
        plot.name,
        plot.title,
        plot.subtitle,
        height=plot.height,
        data={"values": [row for one in found for row in points(one)]},
        encoding=shared,
        layer=[*_band(label, found), _line(label, found, limits), _hover(label), *_target(plot.target)],
    )


def points(one: Curve) -> list[Spec]:
    """Give a curve's data: s step, c condition, m mean, l and h interval, n seeds."""
    columns = (one.steps, one.mean, one.low, one.high, one.seeds)
    rows = []
    for step, mean, low, high, seeds in zip(*(column.tolist() for column in columns), strict=True):
        row: Spec = {"s": round(step, 1), "c": one.condition, "m": rounded(mean), "n": int(seeds)}
        if low == low:
            row |= {"l": rounded(low), "h": rounded(high)}
        rows.append(row)
    return rows


def domain(found: Sequence[Curve], target: float | None = None) -> list[float]:
    """Show every mean, and of the bands what does not dwarf them."""
    means = np.concatenate([*(one.mean for one in found), [np.nan if target is None else target]])
    means = means[np.isfinite(means)]
    least, most = (float(means.min()), float(means.max())) if len(means) else (0.0, 1.0)
    size = max(abs(least), abs(most))
    room = max(OVERSHOOT * (most - least), 2 * NARROWEST * size) or 1.0
    lows = np.concatenate([np.fmin(one.low, one.mean) for one in found])
    highs = np.concatenate([np.fmax(one.high, one.mean) for one in found])
    lowest, highest = np.nanmin(lows, initial=least), np.nanmax(highs, initial=most)
    low, high = max(float(lowest), least - room), min(float(highest), most + room)
    narrow = high - low <= NARROWEST * max(abs(low), abs(high))
    return [low - room, high + room] if narrow else [low, high]


def describe(found: Sequence[Curve], bins: Bins) -> str:
    """Say what lines and bands are."""
    seeds = int(max((one.seeds.max() for one in found), default=0))
    line = f"Line: mean over {seeds} seeds" if seeds > 1 else "Line: one seed"
    each = f", each point over {bins.width} steps" if bins.width > 1 and not is_sparse(found) else ""
    return f"{line}{each}. {BAND if has_band(found) else NO_BAND if seeds > 1 else ''}".strip()


def has_band(found: Sequence[Curve]) -> bool:
    """Tell whether any point has an interval."""
    return any(bool(np.isfinite(one.low).any()) for one in found)


def is_sparse(found: Sequence[Curve]) -> bool:
    """Tell whether there are so few points that each is worth a dot."""
    return max((len(one.steps) for one in found), default=0) <= MARKED_POINTS


def _steps(last: int | None) -> Spec:
    return {"nice": False, "domainMin": 0, **({} if last is None else {"domainMax": last})}


def _band(label: str, found: Sequence[Curve]) -> list[Spec]:
    if not has_band(found):
        return []
    return [
        {
            "transform": [{"filter": "isValid(datum.l)"}],
            "mark": {"type": "area", "opacity": 0.16, "clip": True, "line": False},
            "encoding": {"y": quantity("l", label), "y2": {"field": "h"}, "strokeDash": None},
        }
    ]


def _line(label: str, found: Sequence[Curve], limits: list[float]) -> Spec:
    dots: Spec | bool = {"filled": True, "size": 28} if is_sparse(found) else False
    scale = {"domain": [rounded(limit) for limit in limits], "zero": False, "nice": True}
    return {
        "mark": {"type": "line", "strokeWidth": 1.8, "clip": True, "point": dots},
        "params": [zoom("x", "y")],
        "encoding": {"y": quantity("m", label, scale=scale)},
    }


def _hover(label: str) -> Spec:
    shown = {"condition": {"param": "hover", "empty": False, "value": 1}, "value": 0}
    select = {"type": "point", "on": "pointerover", "nearest": True, "clear": "pointerout"}
    fields = (("c", "condition", ""), ("s", "step", ",.0f"), ("m", label, ".4~g"))
    more = (("l", "95 % from", ".4~g"), ("h", "95 % to", ".4~g"), ("n", "seeds", "d"))
    seen = hints(*fields, *more)
    return {
        "mark": {"type": "point", "filled": True, "size": 60, "clip": True},
        "params": [{"name": "hover", "select": select}],
        "encoding": {"y": quantity("m", label), "opacity": shown, "strokeDash": None, "tooltip": seen},
    }


def _target(value: float | None) -> list[Spec]:
    if value is None:
        return []
    rule = {"type": "rule", "strokeDash": [4, 4], "color": "#555555"}
    alone: Spec = {"x": None, "color": None, "strokeDash": None, "y": {"field": "t", "type": "quantitative"}}
    return [{"data": {"values": [{"t": value}]}, "mark": rule, "encoding": alone}]
