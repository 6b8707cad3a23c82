"""Charts of time: runs over workers, and the parts of a step."""

from __future__ import annotations

from collections.abc import Sequence

from retrain.report.charts.look import INK, Chart, Spec, by_condition, chart, hints, quantity, zoom
from retrain.report.numbers import rounded, span
from retrain.report.timeline import PARTS, Bar, StepSplit, Timeline

UNITS = ((172_800.0, "hours", 3600.0), (7200.0, "minutes", 60.0), (0.0, "seconds", 1.0))
LANE, LEAST_LANE, MANY_LANES = 28, 2, 40  # pixels; with more lanes the height stays constant
TALLEST = 1000
BAR_HINTS = (
    ("run", "run", ""),
    ("n", "attempt", "d"),
    ("e", "ended", ""),
    ("d", "took", ""),
    ("p", "waited for permits", ""),
)
HALF = 0.41  # of a bar's height, in lanes
PART_COLOURS = ("#56B4E9", "#1a1a1a", "#E69F00", "#0072B2", "#BBBBBB")


def timeline_chart(found: Timeline, conditions: Sequence[str]) -> Chart:
    """Draw attempts over workers, with waits for permits, and failed ones marked."""
    last_s = max((bar.end_s for bar in found.bars), default=0.0)
    unit, size = next((name, size) for least, name, size in UNITS if last_s >= least)
    bars = [_bar(bar, size) for bar in found.bars]
    bad = [row for row in bars if row["e"] not in ("done", "running")]
    waits = [
        {"a": rounded(one.start_s / size), "b": rounded(one.end_s / size), "y": one.lane + HALF}
        | {"z": round(one.lane + HALF - 2 * HALF * one.share, 3)}
        for one in found.waiting
    ]
    x = quantity(
        "a",
        f"{unit} since the first start",
        scale={"nice": False, "domainMin": 0, "domainMax": rounded(1.01 * last_s / size) or 1},
    )
    scale = {"domain": [found.lanes + 0.5, 0.5], "nice": False}
    axis = {"grid": False, "format": "d", "values": list(range(1, found.lanes + 1, 1 + found.lanes // 20))}
    y = quantity("y", "worker", scale=scale, axis=axis)
    spans: Spec = {"x": x, "x2": {"field": "b"}, "y": y, "y2": {"field": "z"}}
    seen = hints(*BAR_HINTS)
    lane = LANE if found.lanes <= MANY_LANES else max(LEAST_LANE, TALLEST / found.lanes)
    return chart(
        "timeline",
        "Runs over workers",
        "Bars: attempts. Black: share of time spent waiting for permits. Crosses: failed attempts.",
        height=round(lane * max(found.lanes, 2)),
        layer=[
            {
                "data": {"values": bars},
                "params": [zoom("x")],
                "mark": {"type": "rect", "stroke": "white", "strokeWidth": 0.7, "clip": True},
                "encoding": {**spans, **by_condition(conditions), "tooltip": seen},
            },
            *_strips(waits, spans),
            *_crosses(bad, seen),
        ],
    )


def _strips(rows: Sequence[Spec], spans: Spec) -> list[Spec]:
    mark = {"type": "rect", "color": INK, "stroke": INK, "strokeWidth": 0.4, "clip": True}
    return [{"data": {"values": rows}, "mark": mark, "encoding": spans}] if rows else []


def _crosses(rows: Sequence[Spec], tooltip: list[Spec]) -> list[Spec]:
    shape: Spec = {"type": "point", "shape": "cross", "angle": 45, "size": 110, "filled": True, "opacity": 1}
    mark = shape | {"color": "black", "stroke": "white", "strokeWidth": 1}
    where = {"x": quantity("b", ""), "y": quantity("w", ""), "tooltip": tooltip}
    return [{"data": {"values": rows}, "mark": mark, "encoding": where}] if rows else []


def _bar(bar: Bar, size: float) -> Spec:
    return {
        "a": rounded(bar.start_s / size), "b": rounded(bar.end_s / size),
        "w": bar.lane, "y": bar.lane + HALF, "z": bar.lane - HALF,
        "c": bar.condition, "run": bar.run_id, "n": bar.attempt, "e": bar.ending,
        "d": span(bar.end_s - bar.start_s), "p": span(bar.permit_wait_s),
    }  # fmt: skip


def split_chart(found: Sequence[StepSplit]) -> Chart:
    """Draw the parts of the mean step of each condition."""
    longest = max(sum(one.seconds) for one in found)
    unit, size = ("milliseconds", 1e-3) if longest < 1 else ("seconds", 1.0)
    rows = [
        {"c": one.condition, "part": part, "v": rounded(seconds / size), "o": i}
        | {"f": rounded(seconds / (sum(one.seconds) or 1))}
        for one in found
        for i, (part, seconds) in enumerate(zip(PARTS, one.seconds, strict=True))
    ]  # fmt: skip
    colours = {"domain": list(PARTS), "range": list(PART_COLOURS)}
    names = [one.condition for one in found]
    y: Spec = {"field": "c", "type": "nominal", "sort": names, "title": None}
    y["axis"] = {"grid": False, "ticks": False, "domain": False}
    seen = hints(("c", "condition", ""), ("part", "part", ""), ("v", unit, ".3~g"), ("f", "share", ".1%"))
    return chart(
        "step-time",
        "What a step's time is spent on",
        "Mean over all steps of all seeds. Asynchronous sampling counts only while training waits for it.",
        height=max(80, 30 * len(names)),
        data={"values": rows},
        mark={"type": "bar", "height": {"band": 0.72}},
        params=[zoom("x")],
        encoding={
            "x": quantity("v", f"{unit} per step", stack="zero"),
            "y": y,
            "color": {"field": "part", "type": "nominal", "scale": colours},
            "order": {"field": "o", "type": "quantitative"},
            "tooltip": seen,
        },
    )  # fmt: skip
