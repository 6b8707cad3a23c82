"""The charts of one campaign as they are now: those of the report, from rows that are read as they come."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from retrain.base.errors import ConfigError, RecordsError
from retrain.records.files import readable
from retrain.records.lines import measured, parse_line, read_lines
from retrain.records.metrics import flat_step
from retrain.records.run_row import RunRow
from retrain.records.text import MISSING, plain
from retrain.records.windows import AXES
from retrain.results.board.live import SHARE, Shown
from retrain.results.report.back_pressure import fits, regime_chart, regime_stretches, scalability, usl_chart
from retrain.results.report.charts import Chart, axis_title
from retrain.results.report.contents import TITLES
from retrain.results.report.curves import Bins, bins_for, curve_chart, curves
from retrain.results.report.curves import Shown as Drawn
from retrain.results.report.engines import KEYS as ENGINE_KEYS
from retrain.results.report.engines import (
    crashes_to_read,
    first_start_s,
    load_charts,
    servers,
    table_of_servers,
)
from retrain.results.report.gather import MOST_METRICS, NOT_METRICS, GrowingColumns, RunHistory
from retrain.results.report.sides import Side
from retrain.results.report.tables import Table, significant

MOST_KEPT = 2000  # files that are followed, of one metric each: 4 kB for 500 rows
MOST_PARSED = 40  # runs whose rows are read with their texts, which takes ten times as long
SAMPLED = 6  # conditions whose first run tells which metrics there are
EVERY_S = 2.0  # between two drawings, at least
PRESSURE = ("prompts_at_a_time", "batch_size", "group_size", "tokens_per_second", "bp_p_star")
PERMITS = {
    "permits": "Permits",
    "permit_wait_s": "Waiting for permits in a step, summed over calls",
    "permit_held_s": "Holding permits in a step, summed over calls",
}
NUMBERS = re.compile(rb', "([^"\\\\]+)": -?[0-9]')  # names in a flat row without escapes
SECONDARY = 190  # pixels of a chart's height


@dataclass
class Histories:
    """The rows of runs that a page draws, followed as their files grow."""

    _followed: OrderedDict[tuple[Path, tuple[str, ...], bool], GrowingColumns] = field(
        default_factory=OrderedDict
    )

    def sides(
        self, shown: Shown, runs: Sequence[RunRow], metrics: Collection[str], *, has_more: bool = False
    ) -> tuple[Side, ...]:
        """Return the conditions of runs with these metrics; times and texts as well if it `has_more`."""
        by_condition: dict[str, list[RunHistory]] = {}
        for run in runs:
            histories = by_condition.setdefault(run.condition, [])
            with suppress(RecordsError):  # what cannot be read is named by the table of runs
                histories.append(self._history(shown, run, tuple(metrics), has_more))
        return tuple(Side(name, tuple(histories)) for name, histories in by_condition.items())

    def _history(self, shown: Shown, run: RunRow, metrics: tuple[str, ...], has_more: bool) -> RunHistory:
        files, reading = shown.files_of(run), shown.watched.runs[run.run_id]
        key = files.directory, metrics, has_more
        if key not in self._followed:
            self._followed[key] = GrowingColumns(files.metrics, metrics, has_more=has_more)
            while len(self._followed) > MOST_KEPT:
                self._followed.popitem(last=False)
        self._followed.move_to_end(key)
        return RunHistory(
            **vars(run),
            attempts=reading.seen.attempts,
            columns=self._followed[key].refresh(),
            result=reading.seen.done.result if reading.seen.done else {},
            config={},
            directory=files.directory,
        )


@dataclass(frozen=True)
class Drawing:
    """Charts, tables and sentences of a part of the page."""

    charts: tuple[Chart, ...]
    tables: tuple[Table, ...] = ()
    lines: tuple[str, ...] = ()
    texts: tuple[tuple[str, list[str]], ...] = ()  # titles and lines of logs

    def as_json(self) -> dict[str, Any]:
        return {
            "charts": [{"name": chart.name, "spec": chart.spec} for chart in self.charts],
            "tables": [{"columns": list(columns), "rows": list(rows)} for columns, rows in self.tables],
            "lines": list(self.lines),
            "texts": [{"title": title, "lines": lines} for title, lines in self.texts],
        }


def again_s(cost_s: float) -> float:
    """Return when a page may ask for a drawing again that took so much processor time."""
    return max(EVERY_S, 2 * cost_s / SHARE)


def metrics_of(shown: Shown) -> list[str]:
    """List the metrics of a campaign, by all rows of one run of each of the first conditions."""
    first: dict[str, RunRow] = {}
    for run in sorted(shown.status.runs, key=lambda run: -run.step):
        first.setdefault(run.condition, run)
    names: dict[str, None] = dict.fromkeys(("mean_reward", "eval_reward"))
    for run in list(first.values())[:SAMPLED]:
        lines = readable(lambda path: [*read_lines(path)], shown.files_of(run).metrics) or ()
        for line in lines:
            if flat_step(line) is not None and b"\\" not in line:  # a tenth of the time that parsing takes
                names |= dict.fromkeys(map(bytes.decode, NUMBERS.findall(line)))
            elif row := parse_line(line):
                names |= {name: None for name, value in row.items() if not math.isnan(measured(value))}
    return [name for name in names if name not in NOT_METRICS][:MOST_METRICS]


def curves_of(histories: Histories, shown: Shown, runs: Sequence[RunRow], metric: str, per: str) -> Drawing:
    """Draw a metric of runs by condition, as the report does."""
    if per not in AXES:
        raise ConfigError(f"{plain(per)}: no such axis; there are {', '.join(AXES)}")
    sides = histories.sides(shown, runs, dict.fromkeys((metric, *AXES[per].keys)))
    drawn = _drawn(shown, sides, bins_for(sides, 1, per))
    lines = curves(sides, metric, drawn.bins)
    charts = curve_chart(metric, TITLES.get(metric, axis_title(metric)), lines, drawn)
    return Drawing(
        charts, lines=() if charts else (f"No run that is shown has rows with {plain(metric)} yet.",)
    )


def _drawn(shown: Shown, sides: Sequence[Side], bins: Bins) -> Drawn:
    """Return what charts show: all conditions, so that each keeps its colour whichever are chosen."""
    by_name = {side.label: side for side in sides}
    every = dict.fromkeys(run.condition for run in shown.status.runs)
    return Drawn(tuple(by_name.get(name, Side(name, ())) for name in every), bins)


def pressure_of(histories: Histories, shown: Shown, runs: Sequence[RunRow]) -> Drawing:
    """Draw what back pressure measured: the curve, its operating point, regimes, and the last reasons."""
    steered = [run for run in runs if run.bp_regime][:MOST_PARSED]
    sides = histories.sides(shown, steered, PRESSURE, has_more=True)
    fitted = tuple(fit for side in sides if (fit := scalability(side)))
    if not fitted:
        return Drawing((), lines=("No run that is shown uses back pressure.",))
    drawn = _drawn(shown, sides, bins_for(sides, 2))
    histories_of = list(chain(*(side.runs for side in sides)))
    charts = [usl_chart(fitted, drawn.labels)]
    if stretches := regime_stretches(histories_of):
        charts.append(regime_chart(stretches, drawn.bins.end))
    for metric, title in (("batch_size", "Batch size used"), ("bp_p_star", axis_title("bp_p_star"))):
        charts += curve_chart(metric, title, curves(sides, metric, drawn.bins), drawn, height=SECONDARY)
    reasons = {event.run_id: event.text for event in shown.events if event.kind == "batch"}
    now = ("run", "regime", ">batch size", ">p*", ">throughput over the best", "last change, and why")
    rows = [
        (
            run.name,
            run.bp_regime,
            str(run.batch_size),
            significant(run.bp_p_star),
            significant(run.bp_utilization),
            reasons.get(run.run_id, MISSING),
        )
        for run in steered
    ]
    return Drawing(tuple(charts), (fits(fitted), (now, rows)))


def engines_of(histories: Histories, shown: Shown, runs: Sequence[RunRow]) -> Drawing:
    """Draw permits and the load of the servers that sample, over time."""
    read = [run for run in runs if run.attempt][:MOST_PARSED]
    sides = histories.sides(shown, read, (*PERMITS, *ENGINE_KEYS), has_more=True)
    drawn, charts = _drawn(shown, sides, bins_for(sides, len(PERMITS))), list[Chart]()
    for metric, title in PERMITS.items():
        charts += curve_chart(metric, title, curves(sides, metric, drawn.bins), drawn, height=SECONDARY)
    records = [run for side in sides for run in side.runs]
    used, began_s = servers(records), first_start_s(records)
    charts += load_charts(used, began_s)
    lines = (
        [f"permits, last change: {permits.change}"]
        if (permits := shown.status.permits) and permits.change
        else []
    )
    if not charts:
        lines.append("No run that is shown has used permits or a server yet.")
    crashes = tuple(crashes_to_read(used, began_s))
    return Drawing(tuple(charts), (table_of_servers(used),) if used else (), tuple(lines), crashes)
