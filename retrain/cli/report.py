"""`retrain report`: a campaign as one file to look at and to share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Format(StrEnum):
    """What a report is written as."""

    HTML = "html"
    PNG = "png"
    SVG = "svg"
    CSV = "csv"
    PARQUET = "parquet"


def command(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A campaign, a run, or a log directory with one of them.")
    ] = Path("logs"),
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to; default: report.FORMAT.")
    ] = None,
    form: Annotated[
        Format | None, typer.Option("--format", help="Default: what FILE ends in, else html.")
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metric", "-m", metavar="NAME", help="Draw and compare this as well; repeat for more."
        ),
    ] = None,
) -> None:
    """Make one HTML file of a campaign: curves, comparison, failures, configuration, provenance.

    It needs no network to be viewed. png and svg write one file per chart, csv and parquet the rows.

    Example: retrain report logs/study-20260101T120000Z-1a2b -o study.html
    """
    from retrain.report.gather import gather
    from retrain.report.outputs import chosen_format, write

    chosen = chosen_format(output, form)
    target = output or Path(f"report.{chosen}")
    campaign = gather(directory)
    for problem in campaign.problems:
        typer.echo(problem, err=True)
    for path in write(campaign, target, chosen, metrics or ()):
        typer.echo(f"{path}  {path.stat().st_size / 1000:,.0f} kB")
