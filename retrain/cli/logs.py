"""`retrain logs`: output of a run, or of a campaign in the background."""

from __future__ import annotations

import typer
from typer import Option

from retrain.cli import RunDirectory, RunId


def command(
    directory: RunDirectory,
    run: RunId = "",
    following: bool = Option(
        False, "--follow", "-f", help="Follow until the run ends; Ctrl-C does not stop the run."
    ),
    lines: int = Option(200, "--lines", "-n", min=1, metavar="N", help="Number of lines to show first."),
) -> None:
    """Show a run's output; without a run's name, the messages of the campaign's orchestrator.

    Example: retrain logs logs/campaign-20260101T120000Z-1a2b grpo_s0 -f
    """
    from retrain.results.status.one_run import find_log, follow

    log = find_log(directory, run)
    has_output = False
    for path in (*log.beside, log.path):
        is_followed = following and path == log.path
        shown = follow(path, lines, log.is_over if is_followed else lambda: True)
        for number, line in enumerate(shown):
            if not number and path != log.path:
                typer.echo(f"{path.name}:", err=True)
            typer.echo(line)
            has_output = True
    if not has_output:
        typer.echo(f"{log.path}: no output" + ("" if log.is_over() else " yet"), err=True)
