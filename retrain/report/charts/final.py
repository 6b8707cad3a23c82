"""Chart of the final values of each condition: every seed a dot."""

from __future__ import annotations

from collections.abc import Sequence

from retrain.report.charts.curves import axis, axis_title
from retrain.report.charts.look import INK, Chart, Spec, by_condition, chart, hints, quantity
from retrain.report.compare import MetricComparison, SideResult
from retrain.report.numbers import rounded
from retrain.report.series import range_of

ROW, NARROW_ROW, MANY_ROWS = 34, 14, 12  # pixels per condition; more conditions than this get narrow rows


def final_chart(found: MetricComparison) -> Chart:
    """Draw values, means and intervals of one metric."""
    names = [side.label for side in found.sides]
    label = axis_title(found.metric)
    y: Spec = {"field": "c", "type": "nominal", "sort": names, "scale": {"domain": names}, "title": None}
    y["axis"] = {"grid": False, "ticks": False, "domain": False}
    values = [value for side in found.sides for _, value in side.values]
    limits = range_of(found.metric, min(values), max(values))
    means = [_mean(side, limits) for side in found.sides if side.values]
    intervals = [row for row in means if "l" in row]
    shown = [*values, *(row[end] for row in intervals for end in "lh")]
    layers = [_seeds(found, names, label, axis(min(shown), max(shown))), _means(means, label)]
    cut = ", clipped to the range of the metric" if any(row.get("cut") for row in means) else ""
    return chart(
        f"final-{found.metric.replace('_', '-')}",
        f"Final {label}, seed by seed",
        f"{found.how[0].upper()}{found.how[1:]}. Circles: seeds. Bar: mean. Line: its 95 % interval{cut}.",
        height=max(80, (ROW if len(names) <= MANY_ROWS else NARROW_ROW) * len(names)),
        encoding={"y": y},
        layer=[_intervals(intervals, label), *layers] if intervals else layers,
    )


def _seeds(found: MetricComparison, names: Sequence[str], label: str, limits: Sequence[float]) -> Spec:
    rows: list[Spec] = [
        {"c": side.label, "v": rounded(value), "seed": "unknown" if seed is None else str(seed)}
        for side in found.sides
        for seed, value in side.values
    ]
    return {
        "data": {"values": rows},
        "mark": {"type": "point", "filled": False, "size": 70, "strokeWidth": 1.8, "opacity": 0.9},
        "encoding": {
            "x": quantity(
                "v", label, scale={"zero": False, "domain": list(map(rounded, limits)), "nice": True}
            ),
            "color": {**by_condition(names)["color"], "legend": None},
            "tooltip": hints(("c", "condition", ""), ("seed", "seed", ""), ("v", label, ".4~g")),
        },
    }


def _means(rows: Sequence[Spec], label: str) -> Spec:
    ends = ("l", "95 % from", ".4~g"), ("h", "95 % to", ".4~g"), ("n", "seeds", "d")
    tooltip = hints(("c", "condition", ""), ("m", "mean", ".4~g"), *ends)
    tick = {"type": "tick", "thickness": 3, "size": 20, "color": INK}
    return {
        "data": {"values": rows},
        "mark": tick,
        "encoding": {"x": quantity("m", label), "tooltip": tooltip},
    }


def _intervals(rows: Sequence[Spec], label: str) -> Spec:
    rule = {"type": "rule", "color": INK, "strokeWidth": 1.4}
    return {
        "data": {"values": rows},
        "mark": rule,
        "encoding": {"x": quantity("l", label), "x2": {"field": "h"}},
    }


def _mean(side: SideResult, limits: tuple[float, float]) -> Spec:
    sample = side.sample
    row: Spec = {"c": side.label, "m": rounded(sample.mean or 0.0), "n": sample.n}
    if sample.low is not None and sample.high is not None:
        low, high = max(sample.low, limits[0]), min(sample.high, limits[1])
        row |= {"l": rounded(low), "h": rounded(high), "cut": low > sample.low or high < sample.high}
    return row


def final_charts(found: Sequence[MetricComparison]) -> list[Chart]:
    """Draw the metrics that have values."""
    return [final_chart(one) for one in found if any(side.values for side in one.sides)]
