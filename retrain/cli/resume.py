"""`retrain resume`: the rest of a campaign."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from retrain.cli.options import AsJson
from retrain.cli.run import carry_out, finish, observe


def command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The campaign's directory.")],
    failed: Annotated[bool, typer.Option("--failed", help="Run again what failed, and only that.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run what is missing of a campaign that was stopped, from the newest checkpoints.

    Finished runs are skipped, failed ones left alone unless --failed is given.

    Example: retrain resume logs/campaign-20260101T120000Z-1a2b
    """
    from retrain.campaign.run import reopen

    with ExitStack() as stack:
        outcome = carry_out(reopen(directory, observe(stack)), retry_failed=failed)
    finish(outcome, as_json=as_json)
