"""`retrain report`: a campaign as one file to read and share."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import typer
from typer import Argument, Option

from retrain.base.errors import ConfigError
from retrain.cli import Force, Over, Per, permission
from retrain.records.windows import LAST, STEPS, read_window


def command(
    directories: list[Path] | None = Argument(
        None, metavar="DIR", help="Campaigns, runs, or a log directory with one of them; default: logs."
    ),
    output: Path | None = Option(
        None, "--output", "-o", metavar="FILE", help="File to write; else report.FORMAT."
    ),
    form: str | None = Option(
        None,
        "--format",
        metavar="html|png|svg|csv|parquet",
        help="Default: by FILE's extension, else html.",
        autocompletion=lambda: ["html", "png", "svg", "csv", "parquet"],
    ),
    metrics: list[str] | None = Option(
        None, "--metric", "-m", metavar="NAME", help="Also plot and compare this metric; repeatable."
    ),
    over: Over = "",
    per: Per = STEPS,
    force: Force = False,
) -> None:
    """Write one HTML file per campaign: curves, comparison, failures, configuration, provenance.

    The file needs no network. png and svg write one file per chart, csv and parquet the rows. With several
    campaigns, each gets its own file, named after it. With --per, learning is drawn along that axis.

    Example: retrain report logs/study-20260101T120000Z-1a2b -o study.html
    """
    from retrain.results.report.gather import gather
    from retrain.results.report.outputs import check_target, chosen_format, write

    chosen, may_replace = chosen_format(output, form), permission(force)
    window = read_window(per, over or LAST) if over or per != STEPS else None
    target = output or Path(f"report.{chosen}")
    targets = {
        directory: target.with_name(f"{target.stem}-{directory.resolve().name}{target.suffix}")
        for directory in directories or [Path("logs")]
    }
    if len(targets) == 1:
        targets = dict.fromkeys(targets, target)
    for path, directories_of in Counter(targets.values()).items():
        if directories_of > 1:
            raise ConfigError(
                f"{path}: would hold {directories_of} directories' reports; use -o for each alone"
            )
    for path in targets.values():
        check_target(path, chosen, may_replace)
    for directory, target in targets.items():
        campaign = gather(directory)
        for problem in campaign.problems:
            typer.echo(problem, err=True)
        for path in write(campaign, target, chosen, metrics or (), may_replace, window):
            typer.echo(f"{path}  {path.stat().st_size / 1000:,.0f} kB")
