"""A report's files: the only part of it that writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from retrain.errors import ConfigError
from retrain.records.files import records_error
from retrain.report.charts.look import VEGA_LITE, Chart, converter
from retrain.report.contents import contents
from retrain.report.export import Table, rows_of, write_csv, write_jsonl, write_parquet
from retrain.report.final import check_metrics, known_metrics
from retrain.report.gather import CampaignRecord
from retrain.report.page import page
from retrain.report.targets import marked, prepare

FORMATS = ("html", "png", "svg", "csv", "parquet")
TABLES = {"csv": write_csv, "jsonl": write_jsonl, "parquet": write_parquet}
IMAGES = ("png", "svg")
SCALE = 3.0  # pixels per point of a PNG: 300 dpi at the width of a page


def chosen_format(output: Path | None, form: str | None, known: Collection[str] = FORMATS) -> str:
    """Return the format that was asked for, or that the file's name says, or the first that is known.

    Raises:
        ConfigError: the name ends in nothing known.
    """
    if form is not None:
        return str(form)
    if output is None:
        return next(iter(known))
    ending = output.suffix.lstrip(".").lower()
    if ending not in known:
        raise ConfigError(f"{output}: ends in no known format; add --format {', '.join(known)}")
    return ending


def write_table(table: Table, form: str, target: Path | None) -> None:
    """Write a table to a file, or to standard output, row by row.

    Raises:
        ConfigError: pyarrow is not installed.
        RecordsError: the disk refused.
    """
    if target is None:
        TABLES[form](table, sys.stdout.buffer)
        return
    try:
        with target.open("wb") as out:
            TABLES[form](table, out)
    except OSError as error:
        raise records_error(target, "write", error) from error


def check_target(target: Path, form: str, may_replace: Callable[[str], bool]) -> None:
    """Refuse a target that must not be written, before anything is computed; see `targets.prepare`."""
    prepare([target.with_name(f"{target.stem}-chart.{form}") if form in IMAGES else target], may_replace)


def write(
    campaign: CampaignRecord,
    target: Path,
    form: str,
    metrics: Sequence[str],
    may_replace: Callable[[str], bool] = lambda what: False,
) -> list[Path]:
    """Write a report.

    Returns:
        The files: one, or for images one per chart beside `target`.

    Raises:
        ConfigError: an extra is not installed, a metric is unknown, there is nothing to draw, or somebody
            else's file is in an image's place.
        RecordsError: the disk refused.
    """
    check_metrics(metrics, known_metrics(campaign.runs))
    if form in TABLES:
        write_table(rows_of([campaign]), form, target)
        return [target]
    files = list(_files(campaign, target, form, metrics))
    if form in IMAGES:  # whose names are known only now
        prepare([path for path, _ in files], may_replace)
    return [_write(path, content) for path, content in files]


def _files(
    campaign: CampaignRecord, target: Path, form: str, metrics: Sequence[str]
) -> Iterator[tuple[Path, bytes]]:
    if form == "html":
        yield target, page(contents(campaign, metrics)).encode("utf-8", "replace")
    else:
        charts = contents(campaign, metrics).charts
        if not charts:
            raise ConfigError(f"{campaign.directory}: no run has rows yet, so there is nothing to draw")
        for chart in charts:
            yield target.with_name(f"{target.stem}-{chart.name}.{form}"), marked(_draw(chart, form), form)


def _draw(chart: Chart, form: str) -> bytes:
    spec = json.dumps(chart.spec, allow_nan=False)
    if form == "svg":
        return str(converter().vegalite_to_svg(spec, vl_version=VEGA_LITE)).encode()
    return bytes(converter().vegalite_to_png(spec, vl_version=VEGA_LITE, scale=SCALE))


def _write(path: Path, content: bytes) -> Path:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise records_error(path, "write", error) from error
    return path
