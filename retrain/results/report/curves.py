"""A metric over steps or what was spent, one line a condition: the mean over seeds, with the seeds or a band.

The axis is divided into equal bins, and each run averaged in each of them, so each seed counts once per bin.
An evaluation before training is at 0, the one at a run's end at its last step.
Failed runs are in no mean, which would jump where they end; a condition without other runs shows them one by
one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from retrain.base.rollouts import Floats
from retrain.records.decision import HELD_OUT
from retrain.records.lines import number_in
from retrain.records.windows import AXES, STEPS
from retrain.results.report import charts as vl
from retrain.results.report.charts import Chart, Spec
from retrain.results.report.gather import RunHistory
from retrain.results.report.sides import Side
from retrain.results.report.statistics import FEWEST_SEEDS, half_width

MOST_POINTS = 100  # of a curve: more would be noise, fewer would hide bends
FEWEST_POINTS = 20
MOST_SEEDS_DRAWN = 5  # as separate lines; with so few, an interval is less informative than the seeds
NUMBERS = 400_000  # of all curves of a page: about 3 MB
MARKED_POINTS = 40  # curves with at most this many points also get dots
OVERSHOOT = 0.12  # of the means' range: a band may leave the chart beyond it
ROUNDING = 1e-9  # of a bin's width: less is not covered


@dataclass(frozen=True)
class Curve:
    """One condition's metric over an axis; arrays have the shape (points,) if nothing else is said."""

    condition: str
    steps: Floats  # of each bin that has values where on the axis they are, in the mean
    mean: Floats  # over seeds; NaN if all runs failed
    low: Floats  # 95 % t interval of the mean; NaN if there are at most `MOST_SEEDS_DRAWN` runs
    high: Floats
    seeds: Floats  # their number
    each: Floats = field(default_factory=lambda: np.empty((0, 0)))  # (runs, points), or empty
    is_cut: bool = False  # whether the interval was clipped to the range of the metric
    decimals: int = 1  # shown of `steps`


@dataclass(frozen=True)
class Bins:
    """Equal bins of an axis, the same for all curves of a page."""

    width: float
    count: int
    end: float  # of the longest run
    per: str = STEPS

    @property
    def decimals(self) -> int:
        """How many decimals tell the bins apart."""
        return 1 if self.per == STEPS else max(0, 4 - math.floor(math.log10(self.end or 1.0)))

    @property
    def title(self) -> str:
        """The title of the axis."""
        return "step" if self.per == STEPS else AXES[self.per].unit


@dataclass(frozen=True)
class Shown:
    """The conditions that charts show, and the bins of their curves."""

    sides: tuple[Side, ...]
    bins: Bins

    @property
    def labels(self) -> tuple[str, ...]:
        """Their names, in the order that gives them their colours."""
        return tuple(side.label for side in self.sides)


def bins_for(sides: Sequence[Side], metrics: int, per: str = STEPS) -> Bins:
    """Choose bins that keep all curves of all metrics together small enough."""
    runs = [run for side in sides for run in side.runs]
    numbers = sum(2 + max(2, _drawn(len(side.runs))) for side in sides)  # of a point: step, mean and others
    room = NUMBERS // max(1, metrics * numbers)
    points = min(max(room, FEWEST_POINTS), MOST_POINTS)
    if per == STEPS:
        longest = max((run.last_step for run in runs), default=0)
        width = max(1, -(-longest // points))
        return Bins(width, -(-longest // width), longest)
    reaches = [ends for run in runs if (ends := run.columns.reached(per))]
    points = min(points, max(map(len, reaches), default=1))
    end = max((ends[-1] for ends in reaches), default=0.0)
    return Bins(end / points or 1.0, points, end, per)


def curve(side: Side, metric: str, bins: Bins) -> Curve:
    """Return a metric's curve of a condition."""
    runs = counted(side.runs)
    binned = [_binned(run, metric, bins) for run in runs or side.runs]  # mean and place of each bin
    values = np.array([run_values for run_values, _ in binned]).reshape(len(binned), bins.count)
    steps = np.array([run_steps for _, run_steps in binned]).reshape(len(binned), bins.count)
    if metric.startswith(HELD_OUT):
        starts = np.array([[run.start.value(metric)] for run in runs or side.runs], float)
        values, steps = np.hstack([starts, values]), np.hstack([np.zeros_like(starts), steps])
    seeds = np.isfinite(values).sum(axis=0)
    has_values = seeds > 0
    values, steps, seeds = values[:, has_values], steps[:, has_values], seeds[has_values]
    if not len(seeds):
        return Curve(side.label, *(np.empty(0),) * 5)
    mean, half = np.full((2, len(seeds)), np.nan)
    if runs:
        mean = np.nanmean(values, axis=0)
    enough = seeds >= FEWEST_SEEDS
    if runs and len(values) > MOST_SEEDS_DRAWN and enough.any():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # overflow of absurd values gives infinity
            spread = np.nanstd(values[:, enough], axis=0, ddof=1)
        half[enough] = half_width(spread, seeds[enough])
    drawn = _drawn(len(values)) if runs else MOST_SEEDS_DRAWN
    limits = vl.range_of(metric, float(np.nanmin(values)), float(np.nanmax(values)))
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
        decimals=bins.decimals,
    )


def _drawn(runs: int) -> int:
    """Return how many runs of a condition are drawn one by one."""
    return runs if 1 < runs <= MOST_SEEDS_DRAWN else 0


def curves(sides: Sequence[Side], metric: str, bins: Bins) -> tuple[Curve, ...]:
    """Return the curves of the conditions that have the metric."""
    every = (curve(side, metric, bins) for side in sides)
    return tuple(line for line in every if len(line.steps))


def counted(runs: Sequence[RunHistory]) -> Sequence[RunHistory]:
    """Exclude runs that failed."""
    return [run for run in runs if not run.has_failed]


def _binned(run: RunHistory, metric: str, bins: Bins) -> tuple[Floats, Floats]:
    """Return a run's mean in each bin and where on the axis it is; NaN where it has none.

    Along what was spent, runs come to the same number of steps at different places. There a step that covers
    several bins is in each of them, and between evaluations is a straight line, so that each seed is in all.
    """
    values, reached = run.columns.metric(metric), run.columns.reached(bins.per)
    if metric.startswith(HELD_OUT) and (final := number_in(run.result, metric)) is not None:
        values = np.where(np.isnan(values) & (np.arange(len(values)) == len(values) - 1), final, values)
    ends = np.full(len(values), np.nan) if reached is None else np.asarray(reached, float)
    is_known = np.isfinite(values) & (ends > 0)
    if bins.per != STEPS and metric.startswith(HELD_OUT):
        at, edges = ends[is_known], bins.width * np.arange(bins.count + 1)
        if not len(at):
            return np.full(bins.count, np.nan), np.full(bins.count, np.nan)
        middles = (np.maximum(edges[:-1], at[0]) + np.minimum(edges[1:], at[-1])) / 2
        places = np.where((edges[1:] >= at[0]) & (edges[:-1] < at[-1]), middles, np.nan)
        return np.where(np.isnan(places), np.nan, np.interp(middles, at, values[is_known])), places
    if bins.per != STEPS:
        sizes = np.where(is_known, np.diff(ends, prepend=0), 0.0)
        return _spread(np.where(is_known, values, 0.0), sizes, ends, bins)
    at = np.minimum(np.ceil(ends[is_known] / bins.width).astype(int) - 1, bins.count - 1)
    hits = np.bincount(at, minlength=bins.count).astype(float)
    hits[hits == 0] = np.nan
    sums = np.bincount(at, values[is_known], bins.count)
    places = np.bincount(at, ends[is_known], bins.count)
    return sums / hits, places / hits


def _spread(values: Floats, sizes: Floats, ends: Floats, bins: Bins) -> tuple[Floats, Floats]:
    """Return the mean of steps in each bin by the share of it that they cover, and the middle of that."""
    if not sizes.any():
        return np.full(bins.count, np.nan), np.full(bins.count, np.nan)
    edges, corners = bins.width * np.arange(bins.count + 1), np.concatenate([[0.0], ends])
    covered, sums = (
        np.diff(np.interp(edges, corners, np.concatenate([[0.0], np.cumsum(part)])))
        for part in (sizes, sizes * values)
    )
    covered[covered <= ROUNDING * bins.width] = np.nan
    places = (edges[:-1] + np.minimum(edges[1:], ends[-1])) / 2
    return sums / covered, np.where(np.isnan(covered), np.nan, places)


def curve_chart(
    metric: str,
    title: str,
    lines: Sequence[Curve],
    shown: Shown,
    *,
    height: int = vl.HEIGHT,
    target: float | None = None,
    most: float = math.inf,
) -> tuple[Chart, ...]:
    """Return the chart of a metric's curves; none without curves.

    A `target` is drawn as a dashed line; `most` bounds the y axis.
    """
    if not lines:
        return ()
    label, end, axis = vl.axis_title(metric), shown.bins.end, shown.bins.title
    low, high = domain(lines, target)
    limits = [low, max(low, min(high, most))]
    rows = list(chain(*map(points, lines)))
    thin = {"type": "line", "strokeWidth": 1, "opacity": 0.45, "clip": True}
    of_seeds = chain(*map(seed_points, lines))
    layers = [vl.layer(of_seeds, thin, y=vl.quantity("v", label), detail={"field": "k"})]
    if rows:
        layers += _means(label, lines, limits, axis)
    if target is not None:
        rule = {"type": "rule", "strokeDash": [4, 4], "color": "#555555"}
        y = {"field": "t", "type": "quantitative"}
        layers.append(vl.layer([{"t": target}], rule, x=None, color=None, strokeDash=None, y=y))
    steps = {"nice": False, "domainMin": 0, **({"domainMax": end} if end else {})}
    colours = vl.by_condition(shown.labels, [line.condition for line in lines], dashed=True)
    drawn = vl.chart(
        metric,
        title,
        describe(lines, shown.bins),
        height=height,
        data={"values": rows},
        encoding={"x": vl.quantity("s", axis, scale=steps), **colours},
        layer=layers,
    )
    return (drawn,)


def points(line: Curve) -> list[Spec]:
    """Return a curve's data: s step, c condition, m mean, l and h interval, n seeds; none without a mean."""
    columns = {name: values for name, values in packed(line).items() if name in "smlhn"}
    rows = (zip(columns, row, strict=True) for row in zip(*columns.values(), strict=True))
    data = [{"c": line.condition} | {name: x for name, x in row if x is not None} for row in rows]
    return data if "m" in columns else []


def has_mean(line: Curve) -> bool:
    """Whether there is a mean: if all runs failed, there is none."""
    return bool(np.isfinite(line.mean).any())


def seed_points(line: Curve) -> list[Spec]:
    """Return the data of a curve's runs: s step, c condition, v value, k which run."""
    data = packed(line)
    return [
        {"s": step, "c": line.condition, "v": value, "k": number}
        for number, values in enumerate(data["v"])
        for step, value in zip(data["s"], values, strict=True)
        if value is not None
    ]


def packed(line: Curve) -> Spec:
    """Return the data of a curve and of its runs in lists, a tenth of `points` and `seed_points`."""
    series = {"m": line.mean, "l": line.low, "h": line.high}
    drawn = {name: values for name, values in series.items() if np.isfinite(values).any()}
    return {
        "c": line.condition,
        "s": [round(place, line.decimals) for place in line.steps.tolist()],
        "n": line.seeds.astype(int).tolist(),
        "v": [list(map(vl.rounded, values)) for values in line.each.tolist()],
        **{name: list(map(vl.rounded, values.tolist())) for name, values in drawn.items()},
    }


def domain(lines: Sequence[Curve], target: float | None = None) -> list[float]:
    """Return an axis that shows every line, and the bands as far as they leave the lines visible."""
    series = [values for line in lines for values in (line.mean, line.each.ravel())]
    means = np.concatenate([*series, [np.nan if target is None else target]])
    means = means[np.isfinite(means)]
    least, most = (float(means.min()), float(means.max())) if len(means) else (0.0, 1.0)
    size = max(abs(least), abs(most))
    room = max(OVERSHOOT * (most - least), 2 * vl.NARROWEST * size) or 1.0
    lowest, highest = _widened(lines, least, most)
    return vl.axis(max(lowest, least - room), min(highest, most + room))


def _widened(lines: Sequence[Curve], low: float, high: float) -> tuple[float, float]:
    """Return limits that hold the bands of all curves as well."""
    lows, highs = (
        np.concatenate(ends) for ends in zip(*((line.low, line.high) for line in lines), strict=True)
    )
    return float(np.nanmin(lows, initial=low)), float(np.nanmax(highs, initial=high))


def describe(lines: Sequence[Curve], bins: Bins) -> str:
    """Return what lines and bands show."""
    each = ""
    if bins.width > 1 and bins.per == STEPS and not is_sparse(lines):
        each = f", each point over {bins.width:.0f} steps"
    seeds = [int(number) for line in lines if has_mean(line) for number in line.seeds]
    means = band = ""
    if seeds:
        fewest, most = min(seeds), max(seeds)  # fewer where runs ended early or failed
        counts = str(most) if fewest == most else f"{fewest} to {most}"
        means = f"Line: {'one seed' if most == 1 else f'mean over {counts} seeds'}{each}. "
    thin = "Thin lines: the seeds." if any(len(line.each) for line in lines) else ""
    if has_band(lines):
        limits = domain(lines)
        cut = ", clipped to the range of the metric" if any(line.is_cut for line in lines) else ""
        beyond = "; it extends beyond the axis" if [*_widened(lines, *limits)] != limits else ""
        band = f" Band: its 95 % confidence interval (Student's t){cut}{beyond}."
    failed = ", ".join(line.condition for line in lines if len(line.each) and not has_mean(line))
    without_mean = f" All runs of {failed} failed: no mean." if failed else ""
    return f"{means}{thin}{band}{without_mean}".rstrip()


def has_band(lines: Sequence[Curve]) -> bool:
    """Whether any point has an interval."""
    return any(bool(np.isfinite(line.low).any()) for line in lines)


def is_sparse(lines: Sequence[Curve]) -> bool:
    """Whether there are few enough points to draw a dot for each."""
    return max((len(line.steps) for line in lines), default=0) <= MARKED_POINTS


def _means(label: str, lines: Sequence[Curve], limits: list[float], axis: str) -> Iterator[Spec]:
    """Iterate over the layers of the means: their bands, their lines, and dots with their values on hover."""
    if has_band(lines):
        yield {
            "transform": [{"filter": "isValid(datum.l)"}],
            "mark": {"type": "area", "opacity": 0.16, "clip": True, "line": False},
            "encoding": {"y": vl.quantity("l", label), "y2": {"field": "h"}, "strokeDash": None},
        }
    dots: Spec | bool = {"filled": True, "size": 28} if is_sparse(lines) else False
    scale = {"domain": [vl.rounded(limit) for limit in limits], "zero": False, "nice": True}
    yield {
        "mark": {"type": "line", "strokeWidth": 2.2, "clip": True, "point": dots},
        "params": [vl.zooming("xy")],
        "encoding": {"y": vl.quantity("m", label, scale=scale)},
    }
    shown = {"condition": {"param": "hover", "empty": False, "value": 1}, "value": 0}
    select = {"type": "point", "on": "pointerover", "nearest": True, "clear": "pointerout"}
    place = axis, f",.{max(0, lines[0].decimals - 1)}f"
    seen = vl.hints(c="condition", s=place, m=(label, ".4~g"), **vl.MEAN_HINTS)
    yield {
        "mark": {"type": "point", "filled": True, "size": 60, "clip": True},
        "params": [{"name": "hover", "select": select}],
        "encoding": {"y": vl.quantity("m", label), "opacity": shown, "strokeDash": None, "tooltip": seen},
    }
