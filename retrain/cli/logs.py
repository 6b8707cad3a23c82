"""`retrain logs`: output of a run, or of a campaign in the background."""

from __future__ import annotations

from itertools import chain

import typer
from typer import Option

from retrain.cli import RunDirectory, RunId


def command(
    directory: RunDirectory,
    run: RunId = "",
    following: bool = Option(
        False, "--follow", "-f", help="Follow until the run ends; Ctrl-C does not stop the run."
    ),
    lines: int = Option(200, "--lines", "-n", min=1, help="Number of lines to show first."),
) -> None:
    """Show a run's output; without a run's name, the messages of the campaign's orchestrator.

    Example: retrain logs logs/campaign-20260101T120000Z-1a2b grpo_s0 -f
    """
    from retrain.records.tail import follow, last_lines
    from retrain.status.one_run import find_log

    log = find_log(directory, run)
    has_output = False
    for path in log.beside:
        typer.echo(f"{path.name}:", err=True)
        for line in last_lines(path, lines)[0]:
            typer.echo(line)
            has_output = True
    begun, at = last_lines(log.path, lines)
    for line in chain(begun, follow(log.path, at, log.is_over if following else lambda: True)):
        typer.echo(line)
        has_output = True
    if not has_output:
        typer.echo(f"{log.path}: no output" + ("" if log.is_over() else " yet"), err=True)
