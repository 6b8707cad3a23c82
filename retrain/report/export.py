"""Exports the rows of all runs as one table: for a spreadsheet, R, pandas or a database."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from retrain import extras
from retrain.errors import RecordsError, records_error
from retrain.records.layout import RunFiles
from retrain.records.lines import Row
from retrain.records.metrics import stream_rows
from retrain.records.run_state import UNREADABLE
from retrain.report.compare import SEED, deciding
from retrain.report.gather import CampaignRecord, RunHistory
from retrain.report.sides import Moment, final_value, known_metrics

FIRST = ("campaign", "run", "condition", "seed", "state", "step")
PART_ROWS = 1000  # in memory as dictionaries at a time
GROUP_PARTS = 8  # per Parquet row group; small groups are slow to read


@dataclass(frozen=True)
class Table:
    """Columns and rows; a row omits columns without a value."""

    kinds: Mapping[str, set[type]]  # column -> kinds of its values
    read: Callable[[], Iterator[Row]]  # reads again at each call, because all rows may not fit in memory

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.kinds)


def rows_of(campaigns: Sequence[CampaignRecord], *, of_warm_ups: bool = False) -> Table:
    """Return every step of every run once: its row, and which run it belongs to.

    Runs with damaged records are left out. `of_warm_ups` returns the supervised updates before the first step
    instead, which `step` then counts.
    """

    def read() -> Iterator[Row]:
        runs = ((campaign, run) for campaign in campaigns for run in campaign.runs)
        for campaign, run in runs:
            files, known = RunFiles(run.directory), _identity(campaign, run)
            if run.state != UNREADABLE:
                with contextlib.suppress(RecordsError):
                    rows = stream_rows(files.warmup if of_warm_ups else files.metrics)
                    yield from (row | known for row in rows)

    return _table(read)


def ends_of(campaigns: Sequence[CampaignRecord]) -> Table:
    """Return one row per run: its state, the final value of every metric, and its configuration."""
    return _table(lambda: (_end(campaign, run) for campaign in campaigns for run in campaign.runs))


def write_table(table: Table, form: str, target: Path | None) -> None:
    """Write a table to a file, or to standard output, row by row."""
    if target is None:
        TABLES[form](table, sys.stdout.buffer)
        return
    with written(target), target.open("wb") as out:
        TABLES[form](table, out)


@contextlib.contextmanager
def written(path: Path) -> Iterator[None]:
    """Turn an error of writing a file into a message that names it."""
    try:
        yield
    except OSError as error:
        raise records_error(path, "write", error) from error


def write_csv(table: Table, out: BinaryIO) -> None:
    """Write CSV; values other than numbers and text are JSON."""
    text = io.TextIOWrapper(out, encoding="utf-8", errors="replace", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    try:
        writer.writerow(table.columns)
        for row in table.read():
            values = (row.get(name) for name in table.columns)
            writer.writerow([x if isinstance(x, int | float | None) else _text(x) for x in values])
    finally:
        text.detach()  # the caller closes the file


def write_jsonl(table: Table, out: BinaryIO) -> None:
    """Write one JSON object per line."""
    for row in table.read():
        out.write(json.dumps(row).encode() + b"\n")


def write_parquet(table: Table, out: BinaryIO) -> None:
    """Write Parquet: numbers as doubles or integers, everything else as text."""
    arrow = extras.load("pyarrow", "parquet", "parquet files")
    parquet = extras.load("pyarrow.parquet", "parquet", "parquet files")
    types = {bool: arrow.bool_(), str: arrow.string(), int: arrow.int64(), float: arrow.float64()}
    kinds, rows = {name: _one_kind(found) for name, found in table.kinds.items()}, table.read()
    schema = arrow.schema([(name, types[kind] if kind else arrow.null()) for name, kind in kinds.items()])

    def parts() -> Iterator[Any]:
        while part := list(islice(rows, PART_ROWS)):
            columns = [_column([row.get(name) for row in part], kind) for name, kind in kinds.items()]
            yield arrow.table(columns, schema=schema)

    made = parts()
    with parquet.ParquetWriter(out, schema) as writer:
        while group := list(islice(made, GROUP_PARTS)):
            writer.write_table(arrow.concat_tables(group))


TABLES = {"csv": write_csv, "jsonl": write_jsonl, "parquet": write_parquet}


def _table(read: Callable[[], Iterator[Row]]) -> Table:
    kinds: dict[str, set[type]] = defaultdict(set, {name: set() for name in FIRST})
    for row in read():
        for name, value in row.items():
            found = kinds[name]  # also of a column without values
            if value is not None:
                found.add(float if type(value) is int and abs(value) >= 2**63 else type(value))
    return Table(kinds, read)


def _end(campaign: CampaignRecord, run: RunHistory) -> Row:
    row = _identity(campaign, run) | {"step": run.last_step, "message": run.message}
    at = Moment() if run.is_done else Moment(step=run.last_step)
    row |= {f"final.{name}": final_value(run, name, at) for name in known_metrics([run])}
    return row | {key: value for key, value in deciding(run.config) if key != SEED}


def _identity(campaign: CampaignRecord, run: RunHistory) -> Row:
    return dict(zip(FIRST, (campaign.id, run.run_id, run.condition, run.seed, run.state), strict=False))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _one_kind(kinds: set[type]) -> type | None:
    """Return the one type of a column that Parquet requires; None without values."""
    if len(kinds) > 1:
        return float if kinds <= {int, float} else str
    kind = next(iter(kinds), None)
    return kind if kind in (None, bool, str, int, float) else str


def _column(values: Sequence[Any], kind: type | None) -> Sequence[Any]:
    if kind not in (float, str):
        return values
    convert = float if kind is float else _text
    return [None if value is None else convert(value) for value in values]
