"""`retrain export`: every step of every run as one table."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import typer
from typer import Argument, Option

from retrain.cli import Force, permission


def command(
    directory: Path = Argument(Path("logs"), metavar="DIR", help="A log directory, a campaign or a run."),
    output: Path | None = Option(
        None, "--output", "-o", metavar="FILE", help="File to write; default: standard output."
    ),
    form: str | None = Option(
        None,
        "--format",
        metavar="csv|jsonl|parquet",
        help="Default: by FILE's extension, else csv.",
        autocompletion=lambda: ["csv", "jsonl", "parquet"],
    ),
    runs: bool = Option(False, "--runs", help="One row per run instead: its result and its configuration."),
    warmup: bool = Option(False, "--warmup", help="One row per supervised update of a warm-up instead."),
    force: Force = False,
) -> None:
    """Write every step of every run as one table, each step once, for pandas, R or SQL.

    Example: retrain export logs/study-20260101T120000Z-1a2b -o rows.parquet
    """
    from retrain.base.errors import ConfigError
    from retrain.records.layout import unread_campaigns
    from retrain.results.report.gather import gather_all
    from retrain.results.report.outputs import TABLES, chosen_format, ends_of, prepare, rows_of, write_table

    if runs and warmup:
        raise ConfigError("--runs --warmup: use only one of them")
    chosen = chosen_format(output, form, TABLES)
    if output is not None:
        prepare([output], permission(force))
    campaigns = gather_all(directory, with_rows=runs)
    for line in chain(unread_campaigns(directory), *(campaign.unread for campaign in campaigns)):
        typer.echo(line, err=True)
    rows = ends_of(campaigns) if runs else rows_of(campaigns, of_warm_ups=warmup)
    write_table(rows, chosen, output)
    if output is not None:
        typer.echo(f"{output}  {output.stat().st_size / 1000:,.0f} kB", err=True)
