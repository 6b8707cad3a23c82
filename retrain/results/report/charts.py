"""Vega-Lite charts in one style: dark on white, colors for the color-blind, sizes for print.

Page, PNG and SVG are made of the same specs, and of `style.json`. Specs are dictionaries and not altair's
objects: importing altair takes 0.6 s and 30 MB, which would take the report of a large campaign beyond its
200 MB.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from operator import itemgetter
from typing import Any

from retrain.base import extras
from retrain.records.text import short_labels
from retrain.results.report.compare import MetricComparison

Spec = dict[str, Any]

VEGA_LITE = "6.1"  # of the versions in vl-convert, the last whose nearest-point tooltips show text (PR 9707)
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
WIDTH, HEIGHT = 720, 260
STYLE: Spec = json.loads(resources.files("retrain.results.report").joinpath("style.json").read_bytes())
INK = STYLE["title"]["color"]
# Okabe and Ito's colours, without the yellow, which is too pale for lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2], [12, 4])  # 35 distinct combinations
LEGEND_CONDITIONS = 24  # a legend of more would be larger than the chart
SUBTITLE_WIDTH = 118  # characters
TITLE_WIDTH = 84
BOUNDED = ("reward", "_rate", "_fraction")  # metrics bounded by 1 if no value exceeds it
NARROWEST = 0.002  # of the values' size: labels have four digits, and an axis needs several distinct ones
MEAN_HINTS = {"l": ("95 % from", ".4~g"), "h": ("95 % to", ".4~g"), "n": ("seeds", "d")}
FLAT_ROOM = 1.25  # of a value that never changes: its axis runs from 0 to this multiple
ROW, NARROW_ROW, MANY_ROWS = 34, 14, 12  # pixels per condition; more conditions than this get narrow rows
LONGEST = 22  # characters of a label, a third of a phone's width
SYMBOL, LETTER = 40, 7  # pixels in a legend: of a symbol with the room around it, and of a letter
LONGEST_NAME = 120  # bytes, of a file's 255
NAMES = {
    "eval_reward": "held-out reward",
    "rate_ratio": "samples per batch over target",
    "rate_sample_age_mean": "mean age (policy versions)",
    "bp_p_star": "p* (rollouts at a time)",
    "batch_size": "batch size (prompts)",
    "warm_up_loss": "loss (nats per token)",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "entropy": "entropy (nats per token)",
    "teacher_kl": "distance (nats per token)",
}


@dataclass(frozen=True)
class Chart:
    """A chart, and the name of its file."""

    name: str  # letters, digits and dashes
    spec: Spec


def chart(
    name: str, title: str, subtitle: str, *, height: int = HEIGHT, layer: Sequence[Spec] = (), **spec: Any
) -> Chart:
    """Return a chart with title, size and style.

    `name` may have any characters; those that a file's name should not have become dashes.

    Layers without data are left out, because Vega warns of them.
    """
    lines = textwrap.wrap(subtitle, SUBTITLE_WIDTH)
    heading: Spec = {"text": textwrap.wrap(title, TITLE_WIDTH), **({"subtitle": lines} if lines else {})}
    size = {
        "width": WIDTH,
        "height": height,
        "padding": {"left": 8, "top": 8, "bottom": 8, "right": 8},
        "autosize": {"type": "fit-x", "contains": "padding"},
    }
    if layer:
        spec["layer"] = [each for each in layer if "data" not in each or each["data"]["values"]]
    slug = re.sub(r"[\W_]+", "-", name.lower()).encode()[:LONGEST_NAME].decode(errors="ignore")
    return Chart(slug.strip("-"), {"$schema": SCHEMA, "title": heading, **size, **spec})


def layer(values: Iterable[Spec], mark: Spec, *, zoom: str = "", **encoding: Any) -> Spec:
    """Return a layer of a chart with data of its own.

    Drag moves the axes named in `zoom`, Ctrl + wheel zooms them; a plain wheel scrolls the page.
    """
    params = {"params": [zooming(zoom)]} if zoom else {}
    return params | {"data": {"values": list(values)}, "mark": mark, "encoding": encoding}


def zooming(axes: str) -> Spec:
    """Return the parameter of a layer whose axes can be moved and zoomed."""
    select = {"type": "interval", "encodings": list(axes), "zoom": "wheel![event.ctrlKey || event.metaKey]"}
    return {"name": "zoom", "select": select, "bind": "scales"}


def by_condition(
    conditions: Sequence[str], shown: Collection[str] | None = None, *, dashed: bool = False
) -> Spec:
    """Return the encoding that gives each condition its color in all charts and, if `dashed`, its dashes.

    `conditions` are all of the report, `shown` those of the chart, which the legend lists; None: all.
    """
    names = list(conditions)
    listed = [name for name in names if shown is None or name in shown]
    symbol: Spec = {"symbolType": "stroke" if dashed else "square", "symbolOpacity": 1, "values": listed}
    longest = max(map(len, short_labels(names, LONGEST)), default=0)  # labels take as many rows as they need
    symbol |= label_expression(names) | {"columns": max(1, WIDTH // (SYMBOL + LETTER * longest))}
    legend = symbol if 1 < len(listed) <= LEGEND_CONDITIONS or len(listed) == 1 < len(names) else None
    ranges: Spec = {"color": [COLOURS[i % len(COLOURS)] for i in range(len(names))]}
    if dashed:
        ranges["strokeDash"] = [DASHES[i // len(COLOURS) % len(DASHES)] for i in range(len(names))]
    shared = {"field": "c", "type": "nominal", "legend": legend}
    return {name: shared | {"scale": {"domain": names, "range": values}} for name, values in ranges.items()}


def label_expression(names: Sequence[str]) -> Spec:
    """Return the property of an axis or legend that shows names as their labels; none if all are kept."""
    labels = short_labels(names, LONGEST)
    if labels == list(names):
        return {}
    return {"labelExpr": f"{json.dumps(labels)}[indexof({json.dumps(list(names))}, datum.label)]"}


def quantity(field: str, title: str, **more: Any) -> Spec:
    """Return the encoding of a number."""
    return {"field": field, "type": "quantitative", "title": title, **more}


def hints(**fields: str | tuple[str, str]) -> list[Spec]:
    """Return the encoding of a tooltip: of each field its title, and of a number its format."""
    return [
        {"field": field, "title": text, "type": "nominal"}
        if isinstance(text, str)
        else {"field": field, "title": text[0], "type": "quantitative", "format": text[1]}
        for field, text in fields.items()
    ]


def category(field: str, names: Sequence[str], **axis: Any) -> Spec:
    """Return the encoding of one line per name, which has its label."""
    plain: Spec = {"grid": False, "ticks": False, "domain": False, **label_expression(names), **axis}
    scale = {"domain": list(names)}
    return {"field": field, "type": "nominal", "sort": names, "scale": scale, "title": None, "axis": plain}


def rounded(value: float) -> float | None:
    """Return four significant digits, enough for a plot; None if not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def axis_title(metric: str) -> str:
    """Return the name of a metric with its unit."""
    if metric in NAMES:
        return NAMES[metric]
    name, unit = (metric.removesuffix("_s"), " (s)") if metric.endswith("_s") else (metric, "")
    return name.replace("_", " ") + unit


def axis(low: float, high: float) -> list[float]:
    """Return the ends of an axis; it includes zero if values hardly differ."""
    size = max(abs(low), abs(high))
    if high - low > NARROWEST * size:
        return [low, high]
    return [min(0.0, FLAT_ROOM * low), max(0.0, FLAT_ROOM * high)] if size else [0.0, 1.0]


def range_of(metric: str, least: float, most: float) -> tuple[float, float]:
    """Return the range of a metric: from 0 if no value is negative, to 1 for fractions and rewards."""
    is_bounded = most <= 1 and ("pass_at_" in metric or metric.endswith(BOUNDED))
    return 0.0 if least >= 0 else -math.inf, 1.0 if is_bounded else math.inf


def final_chart(metric: MetricComparison) -> Chart:
    """Draw the values, means and intervals of one metric: every seed a circle."""
    names = [side.label for side in metric.sides]
    label = axis_title(metric.metric)
    values = [value for side in metric.sides for _, value in side.values]
    limits = range_of(metric.metric, min(values), max(values))
    means, intervals = list[Spec](), list[Spec]()
    for side in metric.sides:
        if not side.values:
            continue
        sample = side.sample
        row: Spec = {"c": side.label, "m": rounded(sample.mean or 0.0), "n": sample.n}
        if sample.low is not None and sample.high is not None:
            low, high = max(sample.low, limits[0]), min(sample.high, limits[1])
            row |= {"l": rounded(low), "h": rounded(high), "cut": low > sample.low or high < sample.high}
            intervals.append(row)
        means.append(row)
    shown = [*values, *map(itemgetter("l"), intervals), *map(itemgetter("h"), intervals)]
    cut = ", clipped to the range of the metric" * any(map(itemgetter("cut"), intervals))
    line = f" Line: its 95 % interval{cut}." if intervals else ""
    rule = {"type": "rule", "color": INK, "strokeWidth": 1.4}
    tick = {"type": "tick", "thickness": 3, "size": 20, "color": INK}
    hint = hints(c="condition", m=("mean", ".4~g"), **MEAN_HINTS)
    return chart(
        f"final-{metric.metric}",
        f"Final {label}, seed by seed" if metric.window.is_last else f"{label.capitalize()}, seed by seed",
        f"{metric.how[0].upper()}{metric.how[1:]}. Circles: seeds. Bar: mean.{line}",
        height=max(80, (ROW if len(names) <= MANY_ROWS else NARROW_ROW) * len(names)),
        encoding={"y": category("c", names, labelPadding=9)},
        layer=[
            layer(intervals, rule, x=quantity("l", label), x2={"field": "h"}),
            _seeds(metric, names, label, axis(min(shown), max(shown))),
            layer(means, tick, x=quantity("m", label), tooltip=hint),
        ],
    )


def _seeds(metric: MetricComparison, names: Sequence[str], label: str, limits: Sequence[float]) -> Spec:
    rows: list[Spec] = [
        {"c": side.label, "v": rounded(value), "seed": "unknown" if seed is None else str(seed)}
        for side in metric.sides
        for seed, value in side.values
    ]
    circle = {"type": "point", "filled": False, "size": 70, "strokeWidth": 1.8, "opacity": 0.9}
    scale = {"zero": False, "domain": list(map(rounded, limits)), "nice": True}
    x, color = quantity("v", label, scale=scale), by_condition(names)["color"] | {"legend": None}
    return layer(rows, circle, x=x, color=color, tooltip=hints(c="condition", seed="seed", v=(label, ".4~g")))


def converter() -> Any:
    """Import vl-convert, which draws charts without a browser or a network."""
    return extras.load("vl_convert", "report", "retrain report")
