"""All rows of all runs as one table: for a spreadsheet, R, pandas or a database."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain import extras
from retrain.errors import RecordsError
from retrain.records.layout import RunFiles
from retrain.records.lines import Row
from retrain.records.metrics import scan_rows
from retrain.records.run_state import UNREADABLE
from retrain.report.differences import SEED, flatten
from retrain.report.final import Moment, final_value, known_metrics
from retrain.report.gather import CampaignRecord, RunRecord

FIRST = ("campaign", "run", "condition", "seed", "state", "step")


@dataclass(frozen=True)
class Table:
    """Columns and rows; a row lacks the columns that it has no value for."""

    columns: tuple[str, ...]
    rows: list[Row]


def rows_of(campaigns: Iterable[CampaignRecord]) -> Table:
    """Give every step of every run, each once: all that its row says, and which run it was.

    Runs whose records are damaged have no rows.
    """
    return _all_rows(campaigns, lambda run: RunFiles(run.directory).metrics)


def warm_up_of(campaigns: Iterable[CampaignRecord]) -> Table:
    """Give every supervised update of every run's warm-up in the same way; `step` counts updates."""
    return _all_rows(campaigns, lambda run: RunFiles(run.directory).warmup)


def ends_of(campaigns: Iterable[CampaignRecord]) -> Table:
    """Give one row a run: what became of it, every metric's final value, every key of its configuration."""
    return _table([_end(campaign, run) for campaign in campaigns for run in campaign.runs])


def as_csv(table: Table) -> str:
    """Write CSV; what is no number or text stands as JSON."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(table.columns)
    for row in table.rows:
        writer.writerow([_cell(row.get(name)) for name in table.columns])
    return buffer.getvalue()


def as_jsonl(table: Table) -> str:
    """Write one JSON object per line."""
    return "".join(json.dumps(row) + "\n" for row in table.rows)


def as_parquet(table: Table) -> bytes:
    """Write Parquet: numbers as doubles or integers, all else as text.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    arrow = extras.load("pyarrow", "parquet", "parquet files")
    parquet = extras.load("pyarrow.parquet", "parquet", "parquet files")
    columns = {name: arrow.array(_column([row.get(name) for row in table.rows])) for name in table.columns}
    sink = arrow.BufferOutputStream()
    parquet.write_table(arrow.table(columns), sink)
    return bytes(sink.getvalue())


def _table(rows: list[Row]) -> Table:
    names = dict.fromkeys(name for row in rows for name in row)
    return Table((*FIRST, *(name for name in names if name not in FIRST)), rows)


def _all_rows(campaigns: Iterable[CampaignRecord], file_of: Callable[[RunRecord], Path]) -> Table:
    found = ((campaign, run) for campaign in campaigns for run in campaign.runs)
    return _table([row for campaign, run in found for row in _rows(campaign, run, file_of(run))])


def _rows(campaign: CampaignRecord, run: RunRecord, path: Path) -> Iterator[Row]:
    known = _identity(campaign, run)
    if run.state == UNREADABLE:
        return
    try:
        rows = scan_rows(path).rows
    except RecordsError:
        return
    for row in rows:
        yield {**row, **known}


def _end(campaign: CampaignRecord, run: RunRecord) -> Row:
    row = _identity(campaign, run) | {"step": run.last_step, "message": run.message}
    reached = Moment(step=run.last_step)
    for name in known_metrics([run]):
        row[f"final.{name}"] = final_value(run, name, Moment() if run.is_done else reached)
    return row | {key: value for key, value in flatten(run.config) if key != SEED}


def _identity(campaign: CampaignRecord, run: RunRecord) -> Row:
    return {
        "campaign": campaign.id,
        "run": run.run_id,
        "condition": run.condition,
        "seed": run.seed,
        "state": run.state,
    }


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return value if isinstance(value, str | int | float) else json.dumps(value)


def _column(values: Sequence[Any]) -> Sequence[Any]:
    """Make values of one type, as a Parquet column asks for."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {bool} or kinds <= {str} or (kinds <= {int} and _fit_64_bits(values)):
        return values
    convert = float if kinds <= {int, float} else _as_text
    return [None if value is None else convert(value) for value in values]


def _fit_64_bits(values: Sequence[int | None]) -> bool:
    return all(value is None or abs(value) < 2**63 for value in values)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
