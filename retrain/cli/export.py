"""`retrain export`: every step of every run as one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from retrain.cli import Force, permission


def command(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A log directory, a campaign or a run.")
    ] = Path("logs"),
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write; default: standard output."),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="csv|jsonl|parquet",
            help="Default: by FILE's extension, else csv.",
            autocompletion=lambda: ["csv", "jsonl", "parquet"],
        ),
    ] = None,
    runs: Annotated[
        bool, typer.Option("--runs", help="One row per run instead: its result and its configuration.")
    ] = False,
    warmup: Annotated[
        bool, typer.Option("--warmup", help="One row per supervised update of a warm-up instead.")
    ] = False,
    force: Force = False,
) -> None:
    """Write every step of every run as one table, each step once, for pandas, R or SQL.

    Example: retrain export logs/study-20260101T120000Z-1a2b -o rows.parquet
    """
    from retrain.errors import ConfigError
    from retrain.report.gather import gather_all, left_out
    from retrain.report.outputs import TABLES, chosen_format, ends_of, prepare, rows_of, write_table

    if runs and warmup:
        raise ConfigError("--runs --warmup: use only one of them")
    chosen = chosen_format(output, form, TABLES)
    if output is not None:
        prepare([output], permission(force))
    campaigns = gather_all(directory, with_rows=runs)
    for line in left_out(run for campaign in campaigns for run in campaign.runs):
        typer.echo(line, err=True)
    table = ends_of(campaigns) if runs else rows_of(campaigns, of_warm_ups=warmup)
    write_table(table, chosen, output)
    if output is not None:
        typer.echo(f"{output}  {output.stat().st_size / 1000:,.0f} kB", err=True)
