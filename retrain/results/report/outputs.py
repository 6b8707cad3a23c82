"""Writes reports and tables: never through a link, and over another program's file only on request."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import marshal
import os
import shutil
import stat
import struct
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from retrain.base import extras
from retrain.base.errors import ConfigError, RecordsError, records_error
from retrain.records.layout import RunFiles
from retrain.records.lines import Row
from retrain.records.metrics import stream_rows
from retrain.records.run_state import UNREADABLE
from retrain.records.windows import Window
from retrain.results.report.charts import STYLE, VEGA_LITE, Chart, converter
from retrain.results.report.compare import SEED, deciding_keys
from retrain.results.report.contents import contents
from retrain.results.report.gather import CampaignRecord, RunHistory
from retrain.results.report.page import MARK, page
from retrain.results.report.sides import check_metrics, final_value, known_metrics

FORMULA = tuple("=+-@\t\r\n＝＋－＠")  # what a cell begins with that a spreadsheet computes
FORMATS = ("html", "png", "svg", "csv", "parquet")
AGAIN = "try again"  # what to do once the cause of an error is gone
READ_BYTES = 65536  # at either end of a file
PNG_START = 33  # bytes of the signature and the first chunk, which precede any other
SCALE = 3.0  # pixels per point of a PNG: 300 dpi at the width of a page
FIRST = ("campaign", "run", "condition", "seed", "state", "step")
_PLAIN = frozenset({int, float, bool, type(None)})  # types whose values CSV writes as they are
PART_ROWS = 1000  # in memory as dictionaries at a time
GROUP_PARTS = 8  # per Parquet row group; small groups are slow to read


def chosen_format(output: Path | None, form: str | None, known: Collection[str] = FORMATS) -> str:
    """Return the requested format, else the one of the file's suffix, else the first known one."""
    suffix = output.suffix.lstrip(".").lower() if output else next(iter(known))
    if (chosen := form or suffix) in known:
        return chosen
    *others, last = known
    where = f"--format {form}" if form else output
    raise ConfigError(f"{where}: unknown file format; use --format {', '.join(others)} or {last}")


def check_target(target: Path, form: str, may_replace: Callable[[str], bool]) -> None:
    """Check, before anything is computed, that the target may be written; see `prepare`."""
    is_one_file = form == "html" or form in TABLES
    prepare([target if is_one_file else target.with_name(f"{target.stem}-chart.{form}")], may_replace)


def write(
    campaign: CampaignRecord,
    target: Path,
    form: str,
    metrics: Sequence[str],
    may_replace: Callable[[str], bool] = lambda what: False,
    window: Window | None = None,
) -> list[Path]:
    """Write a report; return its files: one, or for images one per chart beside `target`.

    Conditions are compared over a `window`, and learning is drawn along its axis.
    """
    check_metrics(metrics, known_metrics(campaign.runs))
    if form in TABLES:
        write_table(rows_of([campaign]), form, target)
        return [target]
    shown = contents(campaign, metrics, window)
    if form == "html":
        files = {target: page(shown).encode("utf-8", "replace")}
    elif shown.charts:
        charts = {target.with_name(f"{target.stem}-{chart.name}.{form}"): chart for chart in shown.charts}
        prepare(list(charts), may_replace)  # their names are known only now
        files = {path: marked(_draw(chart, form), form) for path, chart in charts.items()}
    else:
        raise ConfigError(f"{campaign.directory}: no run has rows yet, so there is nothing to draw")
    for path, content in files.items():
        try:
            path.write_bytes(content)
        except OSError as error:
            raise records_error(path, "write", error, AGAIN) from error
    return list(files)


def _draw(chart: Chart, form: str) -> bytes:
    spec = json.dumps(chart.spec, allow_nan=False)
    if form == "svg":
        return str(converter().vegalite_to_svg(spec, vl_version=VEGA_LITE, config=STYLE)).encode()
    return bytes(converter().vegalite_to_png(spec, vl_version=VEGA_LITE, config=STYLE, scale=SCALE))


def prepare(paths: Sequence[Path], may_replace: Callable[[str], bool]) -> None:
    """Create the folders of files; a ConfigError if a link, a directory or a foreign file is in the way.

    `may_replace` is called with a description before a file that retrain did not write is replaced.
    """
    foreign = [path for path in paths if _is_foreign(path)]
    if foreign and not may_replace(", ".join(map(str, foreign))):
        raise ConfigError(
            f"{foreign[0]}: exists, and retrain did not write it; --force replaces it, or name another file"
        )
    for folder in {path.parent for path in paths}:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise records_error(folder, "create the folder", error, AGAIN) from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"{folder.absolute()}: cannot be written to; -o names a file elsewhere")


def marked(content: bytes, form: str) -> bytes:
    """Return an image with the mark by which retrain recognizes its own files."""
    if form == "svg":
        return content + b"<!-- " + MARK.encode() + b" -->\n"
    chunk = b"tEXtSoftware\0" + MARK.encode()
    framed = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return content[:PNG_START] + framed + content[PNG_START:]


def _is_foreign(path: Path) -> bool:
    """Whether the path is a file that retrain did not write; devices and pipes are not."""
    linked = path.is_symlink()
    try:
        status = path.stat()
    except FileNotFoundError:
        if linked:
            raise ConfigError(f"{path}: is a broken link; remove it, or name another file") from None
        return False
    except OSError as error:
        raise records_error(path, "access", error, AGAIN) from error
    if stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{path}: is a directory; name a file in it")
    if not stat.S_ISREG(status.st_mode):
        return False
    if linked:
        raise ConfigError(f"{path}: is a link; name its target if that file may be replaced")
    return status.st_size > 0 and not _is_ours(path)


def _is_ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            start = file.read(READ_BYTES)
            file.seek(max(0, os.fstat(file.fileno()).st_size - READ_BYTES))
            end = file.read()
    except OSError:
        return False
    if start.startswith(b"PAR1"):  # names of columns are in the footer
        return all(name.encode() in end for name in FIRST)
    first_line = start.partition(b"\n")[0]
    is_table = first_line.startswith(",".join(FIRST).encode())
    is_json = first_line.startswith(b"{") and all(f'"{name}": '.encode() in first_line for name in FIRST)
    return is_table or is_json or MARK.encode() in start[:1000] or MARK.encode() in end[-100:]


def rows_of(campaigns: Sequence[CampaignRecord], *, of_warm_ups: bool = False) -> Iterator[Row]:
    """Iterate over every step of every run once: its row, and which run it belongs to.

    Runs with damaged records are left out. `of_warm_ups` returns the supervised updates before the first step
    instead, which `step` then counts.
    """
    for campaign, run in ((each, run) for each in campaigns for run in each.runs):
        files, identity = RunFiles(run.directory), _identity(campaign, run)
        if run.state != UNREADABLE:
            with contextlib.suppress(RecordsError):
                for row in stream_rows(files.warmup if of_warm_ups else files.metrics):
                    yield row | identity


def ends_of(campaigns: Sequence[CampaignRecord]) -> Iterator[Row]:
    """Iterate over runs, a row each: its state, the final value of every metric, its configuration."""
    return (_end(campaign, run) for campaign in campaigns for run in campaign.runs)


def write_table(rows: Iterator[Row], form: str, target: Path | None) -> None:
    """Write a table to a file, or to standard output, row by row; a row omits columns without a value."""
    if target is None:
        TABLES[form](rows, sys.stdout.buffer)
        return
    try:
        with target.open("wb") as out:
            TABLES[form](rows, out)
    except OSError as error:
        raise records_error(target, "write", error, AGAIN) from error


def write_csv(rows: Iterator[Row], out: BinaryIO) -> None:
    """Write CSV; values other than numbers and text are JSON.

    All columns are known after the last row only, so rows wait in a temporary file, and those that precede a
    further column are completed from there.
    """
    columns: dict[str, None] = dict.fromkeys(FIRST)
    fewer: list[tuple[int, int]] = []  # of columns, and of rows that have them, before a further column
    count, complete_from = 0, 0  # rows with the present columns, and where they begin
    with tempfile.TemporaryFile() as waiting:
        # a file that is only written has no decoder, which would be reset at every row
        with open(
            waiting.fileno(), "w", encoding="utf-8", errors="replace", newline="", closefd=False
        ) as text:
            writer = csv.writer(text, lineterminator="\n")
            for row in rows:
                if not row.keys() <= columns.keys():
                    fewer.append((len(columns), count))
                    count, complete_from = 0, text.tell()
                    columns |= dict.fromkeys(row)
                cells = {name: x if type(x) in _PLAIN else _cell(_text(x)) for name, x in row.items()}
                writer.writerow(map(cells.get, columns))
                count += 1
        waiting.seek(0)
        csv.field_size_limit(sys.maxsize)  # a row's list may be long
        text = io.TextIOWrapper(waiting, encoding="utf-8", newline="")
        kept = csv.reader(text)
        completed = io.TextIOWrapper(out, encoding="utf-8", errors="replace", newline="", write_through=True)
        writer = csv.writer(completed, lineterminator="\n")
        try:
            writer.writerow(map(_cell, columns))
            for have, of_these in fewer:
                writer.writerows([*row, *[""] * (len(columns) - have)] for row in islice(kept, of_these))
        finally:
            completed.detach()  # the caller closes the file
        text.detach()
        waiting.seek(complete_from)
        shutil.copyfileobj(waiting, out)


def _cell(text: str) -> str:
    """Return a text that no spreadsheet takes for a formula: a name may begin with `=`."""
    return f"'{text}" if text[:1] in FORMULA and len(text) > 1 else text


def write_jsonl(rows: Iterator[Row], out: BinaryIO) -> None:
    """Write one JSON object per line."""
    for row in rows:
        out.write(json.dumps(row).encode() + b"\n")


def write_parquet(rows: Iterator[Row], out: BinaryIO) -> None:
    """Write Parquet: numbers as doubles or integers, everything else as text.

    The types of all columns are known after the last row only, so rows wait in a temporary file.
    """
    arrow = extras.load("pyarrow", "parquet", "parquet files")
    parquet = extras.load("pyarrow.parquet", "parquet", "parquet files")
    types = {bool: arrow.bool_(), str: arrow.string(), int: arrow.int64(), float: arrow.float64()}
    types_of: defaultdict[str, set[type]] = defaultdict(set, {name: set() for name in FIRST})
    parts = 0
    with tempfile.TemporaryFile() as waiting:
        while part := list(islice(rows, PART_ROWS)):
            for name, value in chain.from_iterable(row.items() for row in part):
                of_column = types_of[name]  # also of a column without values
                if value is not None:
                    is_huge = type(value) is int and abs(value) >= 2**63
                    of_column.add(float if is_huge else type(value))
            marshal.dump(part, waiting)
            parts += 1
        kinds = {name: _kind(of_column) for name, of_column in types_of.items()}
        schema = arrow.schema([(name, types[kind] if kind else arrow.null()) for name, kind in kinds.items()])

        def tables() -> Iterator[Any]:
            waiting.seek(0)
            for part in (marshal.load(waiting) for _ in range(parts)):
                columns = [_column([row.get(name) for row in part], kind) for name, kind in kinds.items()]
                yield arrow.table(columns, schema=schema)

        every = tables()
        with parquet.ParquetWriter(out, schema) as writer:
            while group := list(islice(every, GROUP_PARTS)):
                writer.write_table(arrow.concat_tables(group))


TABLES = {"csv": write_csv, "jsonl": write_jsonl, "parquet": write_parquet}


def _end(campaign: CampaignRecord, run: RunHistory) -> Row:
    row = _identity(campaign, run) | {"step": run.last_step, "message": run.message}
    over = Window() if run.is_done else Window(end=run.last_step)
    row |= {f"final.{name}": final_value(run, name, over) for name in known_metrics([run])}
    return row | {key: value for key, value in deciding_keys(run.config) if key != SEED}


def _identity(campaign: CampaignRecord, run: RunHistory) -> Row:
    return dict(zip(FIRST, (campaign.id, run.run_id, run.condition, run.seed, run.state), strict=False))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _kind(kinds: set[type]) -> type | None:
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
