"""`retrain resume`: continue a campaign."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from typer import Argument, Option

from retrain.cli import AsJson, Detach
from retrain.cli.run import JUST_STARTED, carry_out, finish, leave_running, observe


def command(
    directory: Path = Argument(metavar="DIR", help="The campaign's directory."),
    failed: bool = Option(False, "--failed", help="Run only the failed runs again."),
    accept_config_change: bool = Option(
        False, "--accept-config-change", help="Continue although campaign.toml now gives different results."
    ),
    detach: Detach = False,
    just_started: bool = Option(False, JUST_STARTED, hidden=True),
    as_json: AsJson = False,
) -> None:
    """Continue a campaign that was stopped or killed, from the newest checkpoints.

    Finished runs are skipped, failed ones left alone unless --failed is given. Workers that are still
    alive are adopted. A changed campaign.toml is refused, and the changes are shown.

    Example: retrain resume logs/campaign-20260101T120000Z-1a2b
    """
    from retrain.campaign.run import reopen

    if detach:
        reopen(directory, accept_config_change=accept_config_change)  # its errors appear on this terminal
        flags = {"--failed": failed, "--accept-config-change": accept_config_change}
        leave_running(directory, [flag for flag, given in flags.items() if given])
        return
    with ExitStack() as stack:
        campaign = reopen(
            directory, observe(stack), accept_config_change=accept_config_change, just_started=just_started
        )
        outcome = carry_out(campaign, retry_failed=failed)
    finish(outcome, as_json=as_json)
