"""`retrain stop`: ends a campaign from anywhere."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer


def command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The campaign's directory.")],
    now: Annotated[
        bool, typer.Option("--now", help="Kill the workers; steps since their checkpoints are repeated.")
    ] = False,
) -> None:
    """Have a campaign's workers save a checkpoint and leave, whether or not its orchestrator lives.

    Waits until they have left. Ctrl-C ends the waiting, not the stop.

    Example: retrain stop logs/campaign-20260101T120000Z-1a2b
    """
    from retrain.campaign.stop import stop_campaign
    from retrain.records.text import as_typed

    def say(what: str) -> None:
        with suppress(OSError):  # a message that nobody can read is no reason not to stop
            typer.echo(what, err=True)

    found = stop_campaign(directory, now=now, on_wait=say)
    if not found.was_supervised and not found.workers:
        typer.echo(f"{directory}: nothing of it was running")
    else:
        typer.echo(f"{directory}: stopped; go on with: retrain resume {as_typed(directory)}")
