"""What a sweep found: a metric against each key and each pair of keys, and how much of it each key explains.

Shares are of the variance between conditions, whose values are means over their seeds: of a list the share of
its values (one-way analysis of variance), of a range that of a parabola in it. Both are adjusted for the
number of parameters, so a key without effect gets 0 on average; what is left over is noise of the seeds and
keys that matter together only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

import numpy as np

from retrain.base.errors import ConfigError, RecordsError
from retrain.base.rollouts import Floats
from retrain.config.keys import Tables, as_toml
from retrain.config.sweep import Variant, swept_keys, table_of, variants
from retrain.plan.build import shown_name
from retrain.records.layout import CampaignFiles
from retrain.records.provenance import known_origin
from retrain.records.rungs import all_of, read_proposals
from retrain.records.text import MISSING, plain
from retrain.results.report import charts as vl
from retrain.results.report.charts import Chart, Spec
from retrain.results.report.compare import MetricComparison
from retrain.results.report.gather import CampaignRecord
from retrain.results.report.tables import Table, significant

MOST_PAIRS = 6
NAME = 60  # characters of a condition
WIDE = 10.0  # times the smallest value of a list is the largest: its axis is logarithmic
FEWEST_LEFT = 2  # conditions more than parameters, to tell a share from chance


@dataclass(frozen=True)
class Swept:
    """What was swept, and where each condition of a campaign is in it."""

    keys: Tables  # lists, and tables of ranges
    points: Mapping[str, Variant]  # by name of the condition

    def is_listed(self, key: str) -> bool:
        return isinstance(self.keys[key], list)

    def values(self, key: str, names: Sequence[str]) -> list[Any]:
        return [self.points[name].point[key] for name in names]

    def scale(self, key: str) -> str:
        """Return the scale of a key's axis: log, linear, or ordinal if its values are no numbers."""
        values = self.keys[key]
        if isinstance(values, Mapping):
            return "log" if "log_uniform" in values else "linear"
        if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            return "ordinal"
        return "log" if min(values) > 0 and max(values) >= WIDE * min(values) else "linear"


@dataclass(frozen=True)
class Sensitivity:
    """How much of a metric a key explains by itself."""

    key: str
    share: float | None  # of the variance between conditions; None with too few conditions
    best: Any  # the value that is best by itself
    expected: float  # the metric there


def swept_of(campaign: CampaignRecord) -> Swept | None:
    """Return what a campaign swept; None if nothing, or its file is unreadable."""
    from retrain.config.load import load_tables  # imports pydantic, and few campaigns have a sweep
    from retrain.config.sweep import check_sweep  # so does this

    files = CampaignFiles(campaign.directory)
    if "sweep" not in campaign.toml:
        return None
    try:
        raw = load_tables(files.campaign_toml, known_origin(files)[0].overrides)
        if any(check_sweep(raw)):  # the file was edited since
            return None
        keys = swept_keys(table_of(raw))
        every_variant = variants(raw, all_of(read_proposals(files.proposals)))
        named = {
            shown_name(str(variant.table.get("name"))): variant for variant in every_variant if variant.point
        }
    except (ConfigError, RecordsError):
        return None
    points = {name: named[name] for name in campaign.conditions if name in named}
    return Swept(keys, points) if keys and points else None


def sensitivities(metric: MetricComparison, swept: Swept) -> tuple[Sensitivity, ...]:
    """Return what each key explains, the most important first."""
    sides = [side for side in metric.sides if side.values and side.label in swept.points]
    if not sides:
        return ()
    names, means = [side.label for side in sides], np.array([side.sample.mean for side in sides])
    best_of = np.argmin if metric.higher_is_better is False else np.argmax
    keys = []
    for key in swept.keys:
        values = swept.values(key, names)
        if swept.is_listed(key):
            groups = {value: means[[each == value for each in values]] for value in dict.fromkeys(values)}
            fitted = np.array([groups[value].mean() for value in values])
            parameters = len(groups)
        else:
            at = np.log(values) if swept.scale(key) == "log" else np.array(values, dtype=float)
            parameters = min(3, len(set(values)))
            centred = at - at.mean()
            fitted = np.polyval(np.polyfit(centred, means, parameters - 1), centred)
        best = int(best_of(fitted))
        keys.append(Sensitivity(key, _share(means, fitted, parameters), values[best], float(fitted[best])))
    return tuple(sorted(keys, key=lambda each: -1.0 if each.share is None else -each.share))


def _share(values: Floats, fitted: Floats, parameters: int) -> float | None:
    left, total = float(np.square(values - fitted).sum()), float(np.square(values - values.mean()).sum())
    if len(values) < parameters + FEWEST_LEFT or total == 0:
        return None
    return max(0.0, 1 - left / (len(values) - parameters) / (total / (len(values) - 1)))


def charts(metric: MetricComparison, swept: Swept) -> Iterator[Chart]:
    """Iterate over charts of a metric against each key, and against pairs of them."""
    rows, label = list(_rows(metric, swept)), vl.axis_title(metric.metric)
    if not rows:
        return
    stems = list(dict.fromkeys(row["b"] for row in rows))
    scale = {"domain": stems, "range": [vl.COLOURS[n % len(vl.COLOURS)] for n in range(len(stems))]}
    legend = None if len(stems) == 1 else {"symbolOpacity": 1}
    by_stem = {"field": "b", "type": "nominal", "scale": scale, "legend": legend}
    y = vl.quantity("v", label, scale={"zero": False})
    circle = {"type": "point", "filled": False, "size": 50, "strokeWidth": 1.6, "opacity": 0.8}
    line = {"type": "line", "point": {"shape": "diamond", "size": 60}, "strokeWidth": 1.5}
    of_run = vl.hints(c="condition", seed="seed", v=(label, ".4~g"))
    for key in swept.keys:
        layers, x = [], _axis(key, swept)
        if swept.is_listed(key):
            layers = [vl.layer(rows, line, x=x, y=y | {"aggregate": "mean"}, color=by_stem)]
        of_lines = " Lines: means over all seeds and the other keys." if layers else ""
        yield vl.chart(
            f"sweep-{key}",
            f"Final {label} against {key}",
            f"{metric.how[0].upper()}{metric.how[1:]}. Circles: runs.{of_lines}",
            layer=[vl.layer(rows, circle, x=x, y=y, color=by_stem, tooltip=of_run), *layers],
        )
    colours = {"scheme": "viridis", "reverse": metric.higher_is_better is False}
    bar = {"orient": "right", "title": label}
    by_mean = vl.quantity("v", label, aggregate="mean", scale=colours, legend=bar)
    square = {"type": "square", "size": 300, "stroke": vl.INK, "strokeWidth": 0.5}
    mean = [{"field": "v", "aggregate": "mean", "title": label, "type": "quantitative", "format": ".4~g"}]
    for first, second in islice(combinations(swept.keys, 2), MOST_PAIRS):
        x, y = _axis(first, swept), _axis(second, swept)
        yield vl.chart(
            f"sweep-{first}-{second}",
            f"Final {label} against {first} and {second}",
            "Colors: means over seeds, and over the other keys where points coincide.",
            layer=[vl.layer(rows, square, x=x, y=y, color=by_mean, tooltip=mean)],
        )


def _rows(metric: MetricComparison, swept: Swept) -> Iterator[Spec]:
    for side in metric.sides:
        if (variant := swept.points.get(side.label)) is not None:
            row = {"c": side.label, "b": plain(variant.stem, NAME)}
            row |= {f"k{n}": variant.point[key] for n, key in enumerate(swept.keys)}
            for seed, value in side.values:
                yield row | {"v": vl.rounded(value), "seed": str(seed)}


def _axis(key: str, swept: Swept) -> Spec:
    field, scale = f"k{list(swept.keys).index(key)}", swept.scale(key)
    if scale == "ordinal":
        return {"field": field, "type": "ordinal", "title": key, "sort": swept.keys[key]}
    return vl.quantity(field, key, scale={"type": scale, "zero": False, "nice": False, "padding": 12})


def table_of_keys(sensitivities: Sequence[Sensitivity], metric: str) -> Table:
    """Return one row per key: the share that it explains, and its best value."""
    rows = []
    for each in sensitivities:
        share = MISSING if each.share is None else f"{each.share:.0%}"
        rows.append((each.key, share, as_toml(each.best), significant(each.expected)))
    return ("key", ">of the variance", ">best by itself", f">{metric} there"), rows
