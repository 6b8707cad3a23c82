"""`retrain report`: a campaign as one file to read and share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import typer
from typer import Argument, Option

from retrain.base.errors import ConfigError
from retrain.cli import Force, permission


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
    force: Force = False,
) -> None:
    """Write one HTML file per campaign: curves, comparison, failures, configuration, provenance.

    The file needs no network. png and svg write one file per chart, csv and parquet the rows. With several
    campaigns, each gets its own file, named after it.

    Example: retrain report logs/study-20260101T120000Z-1a2b -o study.html
    """
    from retrain.results.report.gather import gather
    from retrain.results.report.outputs import check_target, chosen_format, write

    chosen, may_replace = chosen_format(output, form), permission(force)
    targets = _targets(directories or [Path("logs")], output or Path(f"report.{chosen}"))
    for one in targets.values():
        check_target(one, chosen, may_replace)
    for directory, one in targets.items():
        campaign = gather(directory)
        for problem in campaign.problems:
            typer.echo(problem, err=True)
        for path in write(campaign, one, chosen, metrics or (), may_replace):
            typer.echo(f"{path}  {path.stat().st_size / 1000:,.0f} kB")


def _targets(directories: Sequence[Path], target: Path) -> dict[Path, Path]:
    """Return the file of each campaign: the target, or one named after it for each of several."""
    if len(directories) == 1:
        return {directories[0]: target}
    targets = {
        one: target.with_name(f"{target.stem}-{one.resolve().name}{target.suffix}") for one in directories
    }
    for name, several in Counter(targets.values()).items():
        if several > 1:
            raise ConfigError(f"{name}: would hold {several} directories' reports; use -o for each alone")
    return targets
