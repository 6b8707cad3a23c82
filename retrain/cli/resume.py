"""`retrain resume`: continue a campaign."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import typer
from typer import Argument, Option

from retrain.cli import AsJson, BudgetUsd, Detach
from retrain.cli.run import JUST_STARTED, carry_out, finish, leave_running, observe

MOST_SEEDS = 10_000  # added at a time


def command(
    campaign: str = Argument(metavar="DIR", help="The campaign's directory, or the address of its copy."),
    failed: bool = Option(False, "--failed", help="Run only the failed runs again."),
    accept_config_change: bool = Option(
        False, "--accept-config-change", help="Continue although campaign.toml now gives different results."
    ),
    seeds: str = Option("", "--seeds", metavar="+N", help="Add N seeds to each condition."),
    budget_usd: BudgetUsd = None,
    detach: Detach = False,
    just_started: bool = Option(False, JUST_STARTED, hidden=True),
    as_json: AsJson = False,
) -> None:
    """Continue a campaign that was stopped or killed, from the newest checkpoints.

    Finished runs are skipped, failed ones left alone unless --failed is given. Workers that are still
    alive are adopted. A changed campaign.toml is refused, and the changes are shown. A finished campaign
    may get more seeds; its runs stay as they are. The copy at an address
    (`[logging].mirror`) is first downloaded.

    Examples: retrain resume logs/campaign-20260101T120000Z-1a2b;
    retrain resume logs/campaign-20260101T120000Z-1a2b --seeds +4;
    retrain resume s3://bucket/prefix
    """
    from retrain.campaign.run import reopen
    from retrain.records.mirror import is_address

    number = seeds.removeprefix("+")
    is_valid = seeds.startswith("+") and number.isascii() and number.isdigit()
    if seeds and not (is_valid and 0 < int(number) <= MOST_SEEDS):
        what = f"got {seeds!r}; needs + and a number from 1 to {MOST_SEEDS}, as +4"
        raise typer.BadParameter(what, param_hint="--seeds")
    more, directory = int(number or 0), Path(campaign)
    if is_address(campaign):
        from retrain.campaign.mirror import take_over

        directory = take_over(campaign, partial(typer.echo, err=True))
    opened = partial(
        reopen, directory, accept_config_change=accept_config_change, more_seeds=more, budget_usd=budget_usd
    )
    if detach:
        opened()  # first here: its errors appear on this terminal
        flags = {
            "--failed": failed,
            "--accept-config-change": accept_config_change,
            f"--seeds=+{more}": more,
            f"--budget-usd={budget_usd}": budget_usd,
        }
        leave_running(directory, [flag for flag, given in flags.items() if given], as_json=as_json)
        return
    with ExitStack() as stack:
        observer = observe(stack)
        outcome = carry_out(opened(observer, just_started=just_started), observer, retry_failed=failed)
    finish(outcome, as_json=as_json)
