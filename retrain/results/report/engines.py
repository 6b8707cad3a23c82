"""Servers that sampled: their load over time, as the rows of all their runs tell it, and their crashes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from retrain.base.rollouts import Floats
from retrain.records.text import MISSING, first_of, format_duration, plain, plain_lines
from retrain.results.report import charts as vl
from retrain.results.report.charts import Chart, Spec
from retrain.results.report.gather import RunHistory, unix_seconds
from retrain.results.report.tables import Table
from retrain.results.report.timeline import TimeAxis, time_axis

MOST_POINTS = 300  # of a curve; with more rows, each is the most of several
MOST_SERVERS = 7  # drawn, one colour each; the table lists all
MOST_CRASHES = 20  # shown
HEIGHT = 170  # pixels
CHARTS = {
    "engine_running": ("Completions in progress", "completions"),
    "engine_waiting": ("Completions that wait", "completions"),
    "engine_kv_fraction": ("Key-value cache in use", "share of the cache"),
    "engine_tokens_per_s": ("Tokens sampled per second", "tokens per second"),
}
MEAN = "engine_tokens_per_s"  # of a step; of the others, rows have the most
KEYS = (*CHARTS, "engine_restarts")


class ServerRow(NamedTuple):
    """What a row of metrics.jsonl tells of its server."""

    at_s: float  # when it was written, in Unix seconds
    run: str  # its name
    crash: str  # how the server ended and the last lines of its log, if it was started again; else empty
    values: Sequence[float]  # of `KEYS`; NaN if unknown


@dataclass(frozen=True)
class ServerLoad:
    """What the rows of all runs tell of one server."""

    label: str
    name: str  # its log; its address if others started it
    rows: Sequence[ServerRow]  # in order of time; not empty

    def values(self, key: str) -> Floats:
        return np.array([row.values[KEYS.index(key)] for row in self.rows])

    def crashes(self) -> list[ServerRow]:
        """Return the first row after each crash, of which every run may tell."""
        first = {row.values[-1]: row for row in reversed(self.rows) if row.crash}
        return sorted(first.values(), key=attrgetter("at_s"))


def servers(runs: Sequence[RunHistory]) -> tuple[ServerLoad, ...]:
    """Return the servers that rows tell of, the earliest first."""
    by_name: dict[str, list[ServerRow]] = {}
    for run in runs:
        columns = run.columns
        numbers = np.stack([columns.metric(key) for key in KEYS], axis=1).tolist()
        texts = columns.text("engine_server"), columns.text("engine_crash")
        for at_s, values, name, crash in zip(columns.ends_s.tolist(), numbers, *texts, strict=True):
            if math.isfinite(at_s) and math.isfinite(values[0]):
                by_name.setdefault(name, []).append(ServerRow(at_s, run.name, crash, values))
    rows_of = {name: sorted(rows, key=attrgetter("at_s")) for name, rows in by_name.items()}
    ordered = sorted(rows_of.items(), key=lambda item: item[1][0].at_s)
    return tuple(ServerLoad(f"server {n}", name, rows) for n, (name, rows) in enumerate(ordered, 1))


def first_start_s(runs: Sequence[RunHistory]) -> float:
    """Return when the first attempt began or, if that is unknown, the first row was written."""
    starts = [unix_seconds(attempt.started_at) for run in runs for attempt in run.attempts]
    rows = [at_s for run in runs for at_s in run.columns.ends_s[:1].tolist()]
    return min(filter(math.isfinite, [*starts, *rows]), default=math.inf)


def load_charts(loads: Sequence[ServerLoad], begin_s: float) -> Iterator[Chart]:
    """Draw the figures of the servers' load over time, and their crashes."""
    if not (drawn := loads[:MOST_SERVERS]):
        return
    last = max(load.rows[-1].at_s for load in drawn)
    axis = time_axis(begin_s, last)
    scale = {"domain": [0, axis.place(last)], "nice": False}
    x = vl.quantity("t", f"{axis.unit} since the first start", scale=scale)
    color = vl.by_condition([load.label for load in drawn])["color"]
    crashes = [
        {"c": load.label, "t": axis.place(row.at_s), "e": plain(row.crash)}
        for load in drawn
        for row in load.crashes()
    ]
    after_crashes = " Dashed: after a crash." if crashes else ""
    line = {"type": "line", "strokeWidth": 1.6, "point": {"size": 22}}
    rule = {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 1.5}
    for key, (title, name) in CHARTS.items():
        points = list(chain(*(_points(load, key, axis) for load in drawn)))
        if not points:
            continue
        y = vl.quantity("v", name, scale={"domain": vl.axis(0.0, max(point["v"] for point in points))})
        seen = vl.hints(c="server", t=(axis.unit, ".4~g"), v=(name, ".4~g"))
        yield vl.chart(
            key,
            title,
            ("Mean of each step." if key == MEAN else "The most of each step.") + after_crashes,
            height=HEIGHT,
            encoding={"x": x, "color": color},
            layer=[
                vl.layer(points, line, zoom="x", y=y, tooltip=seen),
                vl.layer(crashes, rule, tooltip=vl.hints(c="server", e="crash")),
            ],
        )


def _points(load: ServerLoad, key: str, axis: TimeAxis) -> Iterator[Spec]:
    """Iterate over points in order of time, each the most of as many rows as there must be."""
    rows = zip(load.rows, load.values(key).tolist(), strict=True)
    points = [(row.at_s, value) for row, value in rows if value == value]
    width = max(1, -(-len(points) // MOST_POINTS))
    for first in range(0, len(points), width):
        most = max(value for _, value in points[first : first + width])
        yield {"c": load.label, "t": axis.place(points[first][0]), "v": vl.rounded(most)}


def table_of_servers(loads: Sequence[ServerLoad]) -> Table:
    """Return one row per server."""
    heads = (">most in progress", ">most waiting", ">most of the cache", ">median tokens/s", ">restarts")
    rows = []
    for load in loads:
        every = (load.values(key) for key in KEYS)
        running, waiting, cache, speed, restarts = (values[np.isfinite(values)] for values in every)
        figures = (
            f"{running.max():.0f}" if len(running) else MISSING,
            f"{waiting.max():.0f}" if len(waiting) else MISSING,
            f"{cache.max():.0%}" if len(cache) else MISSING,
            f"{np.median(speed):,.0f}" if len(speed) else MISSING,
            f"{restarts.max():.0f}" if len(restarts) else MISSING,
        )
        runs = first_of(list(dict.fromkeys(row.run for row in load.rows)))
        rows.append((load.label, *figures, runs, plain(load.name)))
    return ("server", *heads, "runs", "log or address"), rows


def crashes_to_read(loads: Sequence[ServerLoad], begin_s: float) -> Iterator[tuple[str, list[str]]]:
    """Iterate over titles of the first crashes, and what the server said last."""
    every = ((load, row) for load in loads for row in load.crashes())
    for load, row in islice(every, MOST_CRASHES):
        when = f"seen {format_duration(row.at_s - begin_s)} after the first start"
        yield f"{load.label} crashed, {when}", plain_lines(row.crash)
