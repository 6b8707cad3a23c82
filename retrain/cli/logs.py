"""`retrain logs`: what a run, or a campaign in the background, said."""

from __future__ import annotations

from itertools import chain
from typing import Annotated

import typer

from retrain.cli.options import RunDirectory, RunId


def command(
    directory: RunDirectory,
    run: RunId = "",
    following: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until it ends. Ctrl-C ends the reading only.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many lines to begin with.")] = 200,
) -> None:
    """Show the output of a run; of a campaign without a run's name, the messages of its orchestrator.

    Example: retrain logs logs/campaign-20260101T120000Z-1a2b grpo_s0 -f
    """
    from retrain.records.growing import follow, last_lines
    from retrain.status.logs import find_log

    log = find_log(directory, run)
    said_something = False
    for path in log.beside:
        typer.echo(f"{path.name}:", err=True)
        for line in last_lines(path, lines)[0]:
            typer.echo(line)
            said_something = True
    begun, at = last_lines(log.path, lines)
    for line in chain(begun, follow(log.path, at, log.is_over if following else lambda: True)):
        typer.echo(line)
        said_something = True
    if not said_something:
        typer.echo(f"{log.path}: nothing was said yet", err=True)
