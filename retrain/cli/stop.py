"""`retrain stop`: stop a campaign from any machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import typer
from typer import Argument, Option

from retrain.base.errors import RecordsError


def command(
    directory: Path = Argument(metavar="DIR", help="The campaign's directory."),
    now: bool = Option(
        False, "--now", help="Kill the workers; steps since the last checkpoint are repeated."
    ),
    launcher: str = Option(
        "", "--launcher", metavar="PATH", help="The dotted path of your own launcher, which is then imported."
    ),
) -> None:
    """Stop a campaign, whether or not its orchestrator is alive: workers save a checkpoint and exit.

    Waits until they have exited. Ctrl-C ends the wait, not the stop.

    Example: retrain stop logs/campaign-20260101T120000Z-1a2b
    """
    from retrain.campaign.stop import stop_campaign
    from retrain.cli.render.tables import messages
    from retrain.records.text import as_typed
    from retrain.results.status import survey

    stopped = stop_campaign(
        directory, now=now, launcher=launcher, on_wait=partial(messages().print, soft_wrap=True)
    )
    if not stopped.was_supervised and not stopped.workers:
        typer.echo(f"{directory}: nothing was running")
        return
    try:
        then = survey(directory)[0].resume_with
    except RecordsError:  # which resuming it names
        then = f"retrain resume {as_typed(directory)}"
    typer.echo(f"{directory}: stopped{f'; continue with: {then}' if then else ''}")
