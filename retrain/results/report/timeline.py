"""Where the time went: over workers, and within a step.

Records do not number workers, so attempts are packed into as few lanes as possible, in the order in which
they started: on one machine the lanes are its workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from retrain.base.rollouts import Floats
from retrain.records.run_state import Attempt
from retrain.records.text import format_duration
from retrain.results.report import charts as vl
from retrain.results.report.charts import Chart, Spec
from retrain.results.report.curves import counted
from retrain.results.report.gather import RunHistory, unix_seconds
from retrain.results.report.sides import Side

SLACK_S = 0.02  # an attempt's end is written a moment before the next one's start
PIECES = 3000  # of waiting, in all bars together
MOST_PIECES = 60  # in one bar
ENVIRONMENTS = "waiting for environments"
PARTS = {  # of a step, with their colours
    "sampling": "#56B4E9",
    "waiting for permits": "#1a1a1a",
    ENVIRONMENTS: "#CC79A7",
    "rewards": "#E69F00",
    "training": "#0072B2",
    "other": "#BBBBBB",
}
LEAST_SHARE = 0.005  # of a piece's time; less waiting is invisible
UNITS = ((172_800.0, "hours", 3600.0), (7200.0, "minutes", 60.0), (-math.inf, "seconds", 1.0))
LANE, LEAST_LANE, MANY_LANES = 28, 2, 40  # pixels; with more lanes the height stays constant
TALLEST = 1000
HALF = 0.41  # of a bar's height, in lanes


@dataclass(frozen=True)
class Bar:
    """One attempt at a run; times in Unix seconds."""

    run: RunHistory
    attempt: Attempt
    start_s: float
    end_s: float
    lane: int = 0  # from 1

    @property
    def ending(self) -> str:
        """How the attempt ended, or the state of its run."""
        return self.attempt.ending or (self.run.state if self.attempt is self.run.attempts[-1] else "died")

    def waits(self) -> tuple[Floats, Floats]:
        """Return when the attempt's rows were written, and how long each step waited for permits."""
        columns = self.run.columns
        inside = (columns.ends_s >= self.start_s) & (columns.ends_s <= self.end_s + SLACK_S)
        return columns.ends_s[inside], np.nan_to_num(columns.metric("permit_wait_s")[inside])


@dataclass(frozen=True)
class Waiting:
    """A piece of a bar, and the share of its time spent waiting for permits."""

    lane: int
    start_s: float
    end_s: float
    share: float  # at most 1, although the waits of concurrent calls add up to more


@dataclass(frozen=True)
class Timeline:
    """All attempts, the earliest first, and all waiting."""

    bars: tuple[Bar, ...]
    waiting: tuple[Waiting, ...]
    lanes: int


def timeline(runs: Sequence[RunHistory]) -> Timeline:
    """Assign all attempts with known times to lanes."""
    free_from: list[float] = []
    bars: list[Bar] = []
    attempts = []
    for run in runs:
        starts = [unix_seconds(attempt.started_at) for attempt in run.attempts]
        for attempt, start_s, next_s in zip(run.attempts, starts, [*starts, math.inf][1:], strict=True):
            if math.isfinite(start_s):
                end_s = min(_end(run, attempt, start_s, next_s), next_s)
                attempts.append(Bar(run, attempt, start_s, max(start_s, end_s)))  # if the clock was set back
    for bar in sorted(attempts, key=attrgetter("start_s")):
        lane = next((i for i, free in enumerate(free_from) if free <= bar.start_s + SLACK_S), len(free_from))
        free_from[lane : lane + 1] = [bar.end_s]
        bars.append(replace(bar, lane=lane + 1))
    pieces = max(1, min(MOST_PIECES, PIECES // max(1, len(bars))))
    waiting = tuple(piece for bar in bars for piece in _waiting(bar, pieces))
    return Timeline(tuple(bars), waiting, len(free_from))


def _end(run: RunHistory, attempt: Attempt, start_s: float, next_s: float) -> float:
    """Return when an attempt ended; without a record of its end, the time of its last row."""
    if attempt.duration_s is not None and math.isfinite(attempt.duration_s):
        return start_s + max(0.0, attempt.duration_s)
    ended_s = unix_seconds(attempt.ended_at)
    if math.isfinite(ended_s):
        return max(start_s, ended_s)
    rows = run.columns.ends_s[(run.columns.ends_s >= start_s) & (run.columns.ends_s < next_s)]
    return float(rows.max(initial=start_s))


def _waiting(bar: Bar, pieces: int) -> Iterator[Waiting]:
    ends_s, waits = bar.waits()
    length = (bar.end_s - bar.start_s) / pieces
    if not waits.any() or length <= 0:
        return
    piece = np.clip(((ends_s - bar.start_s) / length).astype(int), 0, pieces - 1)
    for number, wait_s in enumerate(np.bincount(piece, waits, pieces)):
        start_s = bar.start_s + number * length
        if wait_s >= LEAST_SHARE * length:
            yield Waiting(bar.lane, start_s, start_s + length, min(1.0, float(wait_s) / length))


def step_split(side: Side) -> dict[str, float]:
    """Return the mean seconds of `PARTS` in all steps of a condition; empty if no row has times.

    Waiting for permits happens while sampling (or while training, on a remote backend). It is summed over
    concurrent calls, so it is limited to the time of sampling in which environments were not waited for.
    """
    runs = [run for run in counted(side.runs) if np.isfinite(run.columns.metric("step_time_s")).any()]
    if not runs:
        return {}
    names = (
        "step_time_s", "sample_time_s", "permit_wait_s", "environment_wait_s", "reward_time_s", "train_time_s"
    )  # fmt: skip
    rows = np.concatenate([np.stack([run.columns.metric(name) for name in names]) for run in runs], axis=1)
    step, sample, wait, environment, reward, train = np.nan_to_num(rows[:, np.isfinite(rows[0])])
    environment = np.minimum(environment, sample)
    wait = np.minimum(wait, sample - environment)
    other = np.maximum(0.0, step - sample - reward - train)
    seconds = (sample - environment - wait, wait, environment, reward, train, other)
    split = {part: float(each.mean()) for part, each in zip(PARTS, seconds, strict=True)}
    return {part: part_s for part, part_s in split.items() if part_s or part != ENVIRONMENTS}


class TimeAxis(NamedTuple):
    """Time since the first start."""

    begin_s: float  # in Unix seconds
    size: float  # of a unit, in seconds
    unit: str

    def place(self, at_s: float) -> float | None:
        return vl.rounded((at_s - self.begin_s) / self.size)


def time_axis(begin_s: float, end_s: float) -> TimeAxis:
    """Return an axis in the unit that fits its length."""
    return next(TimeAxis(begin_s, size, name) for least, name, size in UNITS if end_s - begin_s >= least)


def timeline_chart(attempts: Timeline, conditions: Sequence[str]) -> Chart:
    """Draw attempts over workers, with waits for permits, and failed ones marked."""
    begin_s, end_s = attempts.bars[0].start_s, max(bar.end_s for bar in attempts.bars)
    since, lanes = time_axis(begin_s, end_s), attempts.lanes
    bars = [_row(bar, since) for bar in attempts.bars]
    bad = [row for row in bars if row["e"] not in ("done", "running")]
    waits = [
        _times(piece, since) | {"z": round(piece.lane + HALF - 2 * HALF * piece.share, 3)}
        for piece in attempts.waiting
    ]
    scale = {"nice": False, "domainMin": 0, "domainMax": since.place(end_s + 0.01 * (end_s - begin_s)) or 1}
    axis = {"grid": False, "format": "d", "values": list(range(1, lanes + 1, 1 + lanes // 20))}
    spans: Spec = {
        "x": vl.quantity("a", f"{since.unit} since the first start", scale=scale),
        "x2": {"field": "b"},
        "y": vl.quantity("y", "worker", scale={"domain": [lanes + 0.5, 0.5], "nice": False}, axis=axis),
        "y2": {"field": "z"},
    }
    ends: Spec = {"x": vl.quantity("b", ""), "y": vl.quantity("w", "")}
    seen = vl.hints(run="run", n=("attempt", "d"), e="ended", d="took", p="waited for permits")
    box = {"type": "rect", "stroke": "white", "strokeWidth": 0.7, "clip": True}
    strip = {"type": "rect", "color": vl.INK, "stroke": vl.INK, "strokeWidth": 0.4, "clip": True}
    cross = {"type": "point", "shape": "cross", "angle": 45, "size": 110, "filled": True, "opacity": 1}
    cross |= {"color": "black", "stroke": "white", "strokeWidth": 1}
    lane = LANE if lanes <= MANY_LANES else max(LEAST_LANE, TALLEST / lanes)
    return vl.chart(
        "timeline",
        "Runs over workers",
        "Bars: attempts. Black: share of time spent waiting for permits. Crosses: failed attempts.",
        height=round(lane * max(lanes, 2)),
        layer=[
            vl.layer(bars, box, zoom="x", **spans, **vl.by_condition(conditions), tooltip=seen),
            vl.layer(waits, strip, **spans),
            vl.layer(bad, cross, **ends, tooltip=seen),
        ],
    )


def _row(bar: Bar, since: TimeAxis) -> Spec:
    return _times(bar, since) | {
        "w": bar.lane, "z": bar.lane - HALF,
        "c": bar.run.condition, "run": bar.run.name, "n": bar.attempt.number, "e": bar.ending,
        "d": format_duration(bar.end_s - bar.start_s),
        "p": format_duration(float(bar.waits()[1].sum())),
    }  # fmt: skip


def _times(part: Bar | Waiting, since: TimeAxis) -> Spec:
    return {"a": since.place(part.start_s), "b": since.place(part.end_s), "y": part.lane + HALF}


def split_chart(splits: Mapping[str, Mapping[str, float]]) -> Chart:
    """Draw the parts of the mean step of each condition."""
    longest = max(math.fsum(split.values()) for split in splits.values())
    unit, size = ("milliseconds", 1e-3) if longest < 1 else ("seconds", 1.0)
    order = [part for part in PARTS if any(part in split for split in splits.values())]
    rows = [
        {
            "c": name, "part": part, "v": vl.rounded(part_s / size), "o": order.index(part),
            "f": vl.rounded(part_s / (math.fsum(split.values()) or 1)),
        }
        for name, split in splits.items()
        for part, part_s in split.items()
    ]  # fmt: skip
    colours = {"domain": order, "range": [PARTS[part] for part in order]}
    return vl.chart(
        "step-time",
        "What a step's time is spent on",
        "Mean over all steps of all seeds. Asynchronous sampling counts only while training waits for it.",
        height=max(80, 30 * len(splits)),
        **vl.layer(
            rows,
            {"type": "bar", "height": {"band": 0.72}},
            zoom="x",
            x=vl.quantity("v", f"{unit} per step", stack="zero"),
            y=vl.category("c", list(splits)),
            color={"field": "part", "type": "nominal", "scale": colours},
            order={"field": "o", "type": "quantitative"},
            tooltip=vl.hints(c="condition", part="part", v=(unit, ".3~g"), f=("share", ".1%")),
        ),
    )
