"""`retrain wait`: return when a campaign ends or needs attention."""

from __future__ import annotations

import contextlib
from pathlib import Path

import typer
from typer import Argument, Option

from retrain.cli import AsJson, duration


def command(
    directory: Path = Argument(metavar="DIR", help="The campaign's directory."),
    patience: str = Option(
        "10m", "--patience", metavar="TIME", help="How long a run may be paused, or (at most 1 min) silent."
    ),
    ignored: list[str] = Option(
        [], "--ignore", metavar="KIND", help="stalled, no_signal, paused or unsupervised; repeatable."
    ),
    as_json: AsJson = False,
) -> None:
    """Wait until a campaign ends, and exit with the code that its `retrain run` has, or had.

    Exits with 6 as soon as it needs attention: a worker is silent (stalled), no run of a kind learns any more
    (no_signal), a run has been paused for long (paused), or its orchestrator was killed (unsupervised).
    Reads files only. Ctrl-C ends the wait, not the campaign.

    Example: retrain wait logs/campaign-20260101T120000Z-1a2b --json
    """
    from retrain.base.errors import EXIT_INTERRUPTED
    from retrain.cli.render.tables import console, print_result
    from retrain.cli.render.watch import Inbox, RefreshInterval, Request
    from retrain.records.attention import KINDS
    from retrain.results.status.waiting import CampaignWait

    for kind in ignored:
        if kind not in KINDS:
            raise typer.BadParameter(f"got {kind!r}; needs one of {', '.join(KINDS)}", param_hint="--ignore")
    wait = CampaignWait(directory, duration(patience, "--patience"), ignored)
    interval = RefreshInterval()
    with contextlib.closing(Inbox(has_screen=False)) as inbox:
        while (waited := wait.look()) is None:
            if inbox.wait(interval.rest_s()) is Request.STOP:
                raise typer.Exit(EXIT_INTERRUPTED)
    if as_json:
        print_result(waited)
    else:
        out = console()
        out.print(f"{waited.id}: {waited.state}", soft_wrap=True)
        for each in waited.attention:
            about = f"{each.run} {each.kind}" if each.run else each.kind
            out.print(f"{about}: {each.what}", style="yellow", soft_wrap=True)
        if waited.stopped:
            out.print(f"stopped by itself: {waited.stopped}", style="yellow", soft_wrap=True)
        if waited.resume_with:
            out.print(f"continue with: {waited.resume_with}", soft_wrap=True)
    raise typer.Exit(waited.exit_code)
