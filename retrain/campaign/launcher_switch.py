"""A campaign that goes on under another launcher: only once the engine it was with has none of its runs.

Runs that an engine still holds would begin beside those of the new launcher, and nobody would keep both
below `max_workers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from retrain.campaign.assign import assignment_for_stopping, open_launcher, options_of
from retrain.config.schema import Campaign
from retrain.errors import LaunchError
from retrain.plan.provenance import Provenance
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.text import as_typed

SHOWN_RUNS = 5


def require_left(
    files: CampaignFiles,
    origin: Provenance,
    campaign: Campaign,
    runs: Mapping[str, RunFiles],
    say: Callable[[str], None],
) -> None:
    """Make sure that the engine which a campaign was with has no runs of it, unless it stays there.

    Args:
        files: the campaign's, whose lock is ours.
        origin: how it was launched so far.
        campaign: how it is to go on.
        runs: all runs' files by their ids.
        say: tells whoever watches.

    Raises:
        LaunchError: it has some, or cannot be asked.
    """
    home = files.directory / origin.launcher  # where launchers that queue keep what they submitted
    now = _engine(campaign.launcher, options_of(campaign))
    if _engine(origin.launcher, origin.options) == now or not home.is_dir():
        return
    try:
        launcher = open_launcher(origin.launcher, assignment_for_stopping(files, runs, origin, say))
        queued = [run_id for run_id in launcher.queued() if not runs[run_id].done.exists()]
    except LaunchError as error:
        raise LaunchError(
            f"{files.directory}: was with {origin.launcher}, which cannot be asked whether it still has runs "
            f"of it: {error}. Resume where it can be; if it is gone for good, remove {home}"
        ) from error
    if queued:
        more = f" and {len(queued) - SHOWN_RUNS} more" if len(queued) > SHOWN_RUNS else ""
        raise LaunchError(
            f"{files.directory}: {origin.launcher} still has {len(queued)} runs of it: "
            f"{', '.join(sorted(queued)[:SHOWN_RUNS])}{more}. Take them back with "
            f'`retrain stop {as_typed(files.directory)}`, or go on with launcher = "{origin.launcher}"'
        )


def _engine(launcher: str, options: Mapping[str, Any]) -> tuple[str, object]:
    return launcher, options.get("address", "")
