"""A metric over steps, one line a condition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retrain.report.charts.look import (
    COLOURS,
    HEIGHT,
    LEGEND_CONDITIONS,
    Chart,
    Spec,
    by_condition,
    chart,
    hints,
    quantity,
    zoom,
)
from retrain.report.columns import FloatArray
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
MARKED_POINTS = 40  # curves with at most this many points also get dots
OVERSHOOT = 0.12  # of the means' range: a band may leave the chart beyond it
NARROWEST = 0.002  # of the values' size: labels have four digits, and an axis needs several distinct ones
BAND = "Band: its 95 % confidence interval (Student's t)"
FLAT_ROOM = 1.25  # of a value that never changes: its axis runs from 0 to this multiple
LABEL_GAP = 13  # pixels between the names of two lines at their ends
LABEL_WIDTH = 130


def axis_title(metric: str) -> str:
    """Return the name of a metric with its unit."""
    if metric in NAMES:
        return NAMES[metric]
    name, unit = (metric.removesuffix("_s"), " (s)") if metric.endswith("_s") else (metric, "")
    return name.replace("_", " ") + unit


@dataclass(frozen=True)
class Plot:
    """What is drawn, and its titles.

    Attributes:
        name: of the chart's file.
        metric: names the y axis.
        target: a value to compare with, drawn as a dashed line.
        most: upper bound of the y axis.
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
    is_labelled = len(COLOURS) < len(conditions if is_all else found) <= LEGEND_CONDITIONS
    shared: Spec = {
        "x": quantity("s", "step", scale=_steps(plot.last_step)),
        **by_condition(conditions, [] if is_labelled else listed, dashed=True),
    }
    height = max(plot.height, LABEL_GAP * len(conditions)) if is_labelled else plot.height
    ends = [_names(line_ends(found, limits, height), label, plot.last_step)] if is_labelled else []
    rows = [row for one in found for row in points(one)]
    seeds = _seeds(label, found)
    layers = [
        *([seeds] if is_all or seeds["data"]["values"] else []),
        *([*_band(label, found), _line(label, found, limits), _hover(label)] if rows or is_all else []),
    ]
    return chart(
        plot.name,
        plot.title,
        plot.subtitle,
        height=height,
        room_right=LABEL_WIDTH if is_labelled else 0,
        data={"values": rows},
        encoding=shared,
        layer=[*layers, *_target(plot.target), *ends],
    )


def line_ends(found: Sequence[Curve], limits: Sequence[float], height: int = HEIGHT) -> list[Spec]:
    """Return where to place the name of each line: next to its end, without overlaps."""
    low, high = limits
    gap = LABEL_GAP * (high - low) / height
    ends = sorted((float(known[-1]), one.condition) for one in found if len(known := _known(one)))
    places: list[float] = []
    for value, _ in ends:
        places.append(max([value, *(place + gap for place in places[-1:])]))
    ceiling = high
    for number in reversed(range(len(places))):  # back below the top
        places[number] = min(places[number], ceiling)
        ceiling = places[number] - gap
    return [{"c": name, "e": rounded(place)} for place, (_, name) in zip(places, ends, strict=True)]


def _known(one: Curve) -> FloatArray:
    """Return a curve's values: of the mean, or of the first run where there is none."""
    values = one.mean if has_mean(one) or not len(one.each) else one.each[0]
    return values[np.isfinite(values)]


def points(one: Curve) -> list[Spec]:
    """Return a curve's data: s step, c condition, m mean, l and h interval, n seeds."""
    columns = (one.steps, one.mean, one.low, one.high, one.seeds)
    rows = []
    for step, mean, low, high, seeds in zip(*(column.tolist() for column in columns), strict=True):
        row: Spec = {"s": round(step, 1), "c": one.condition, "m": rounded(mean), "n": int(seeds)}
        if low == low:
            row |= {"l": rounded(low), "h": rounded(high)}
        rows.append(row)
    return rows if has_mean(one) else []


def has_mean(one: Curve) -> bool:
    """Whether there is a mean: if all runs failed, there is none."""
    return bool(np.isfinite(one.mean).any())


def seed_points(one: Curve) -> list[Spec]:
    """Return the data of a curve's runs: s step, c condition, v value, k which run."""
    return [
        {"s": round(step, 1), "c": one.condition, "v": rounded(value), "k": number}
        for number, values in enumerate(one.each.tolist())
        for step, value in zip(one.steps.tolist(), values, strict=True)
        if value == value
    ]


def domain(found: Sequence[Curve], target: float | None = None) -> list[float]:
    """Return an axis that shows every line, and the bands as far as they leave the lines visible."""
    lines = [line for one in found for line in (one.mean, one.each.ravel())]
    means = np.concatenate([*lines, [np.nan if target is None else target]])
    means = means[np.isfinite(means)]
    least, most = (float(means.min()), float(means.max())) if len(means) else (0.0, 1.0)
    size = max(abs(least), abs(most))
    room = max(OVERSHOOT * (most - least), 2 * NARROWEST * size) or 1.0
    lows = np.concatenate([np.fmin(one.low, one.mean) for one in found])
    highs = np.concatenate([np.fmax(one.high, one.mean) for one in found])
    lowest, highest = np.nanmin(lows, initial=least), np.nanmax(highs, initial=most)
    low, high = max(float(lowest), least - room), min(float(highest), most + room)
    return axis(low, high)


def axis(low: float, high: float) -> list[float]:
    """Return the ends of an axis; it includes zero if values hardly differ."""
    size = max(abs(low), abs(high))
    if high - low > NARROWEST * size:
        return [low, high]
    return [min(0.0, FLAT_ROOM * low), max(0.0, FLAT_ROOM * high)] if size else [0.0, 1.0]


def describe(found: Sequence[Curve], bins: Bins) -> str:
    """Return what lines and bands show."""
    seeds = int(max((one.seeds.max() for one in found), default=0))
    line = f"Line: mean over {seeds} seeds" if seeds > 1 else "Line: one seed"
    each = f", each point over {bins.width} steps" if bins.width > 1 and not is_sparse(found) else ""
    thin = " Thin lines: the seeds." if any(len(one.each) for one in found) else ""
    failed = ", ".join(one.condition for one in found if len(one.each) and not has_mean(one))
    none = f" All runs of {failed} failed: no mean." if failed else ""
    return f"{line}{each}.{thin}{_about_bands(found)}{none}"


def _about_bands(found: Sequence[Curve]) -> str:
    if not has_band(found):
        return ""
    low, high = domain(found)
    beyond = any(
        np.nanmin(one.low, initial=low) < low or np.nanmax(one.high, initial=high) > high for one in found
    )
    cut = ", clipped to the range of the metric" if any(one.is_cut for one in found) else ""
    return f" {BAND}{cut}{'; it extends beyond the axis' if beyond else ''}."


def has_band(found: Sequence[Curve]) -> bool:
    """Whether any point has an interval."""
    return any(bool(np.isfinite(one.low).any()) for one in found)


def is_sparse(found: Sequence[Curve]) -> bool:
    """Whether there are few enough points to draw a dot for each."""
    return max((len(one.steps) for one in found), default=0) <= MARKED_POINTS


def _steps(last: int | None) -> Spec:
    return {"nice": False, "domainMin": 0, **({} if last is None else {"domainMax": last})}


def _band(label: str, found: Sequence[Curve]) -> list[Spec]:
    if not has_band(found):
        return []
    return [
        {
            "name": "band",
            "transform": [{"filter": "isValid(datum.l)"}],
            "mark": {"type": "area", "opacity": 0.16, "clip": True, "line": False},
            "encoding": {"y": quantity("l", label), "y2": {"field": "h"}, "strokeDash": None},
        }
    ]


def _seeds(label: str, found: Sequence[Curve]) -> Spec:
    return {
        "name": "seeds",
        "data": {"values": [row for one in found for row in seed_points(one)]},
        "mark": {"type": "line", "strokeWidth": 1, "opacity": 0.45, "clip": True},
        "encoding": {"y": quantity("v", label), "detail": {"field": "k"}},
    }


def _names(rows: Sequence[Spec], label: str, last_step: int | None) -> Spec:
    return {
        "name": "ends",
        "data": {"values": [{**row, "s": last_step or 0} for row in rows]},
        "mark": {
            "type": "text",
            "align": "left",
            "dx": 6,
            "fontSize": 11,
            "limit": LABEL_WIDTH - 8,
            "clip": False,
        },
        "encoding": {"y": quantity("e", label), "text": {"field": "c"}, "strokeDash": None},
    }


def _line(label: str, found: Sequence[Curve], limits: list[float]) -> Spec:
    dots: Spec | bool = {"filled": True, "size": 28} if is_sparse(found) else False
    scale = {"domain": [rounded(limit) for limit in limits], "zero": False, "nice": True}
    return {
        "name": "line",
        "mark": {"type": "line", "strokeWidth": 2.2, "clip": True, "point": dots},
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
