"""A plan becomes finished runs, whatever fails on the way.

It takes a plan, and hands on the directory of a campaign in which every run is done or has a reason not to
be; an `Observer` follows it. It never trains itself (launchers start workers), and never prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retrain.campaign.endings import Ending
    from retrain.plan.matrix import RunPlan
    from retrain.records.layout import CampaignFiles


class Observer:
    """Observes a campaign from the orchestrator's thread, so it returns soon. This one ignores everything."""

    def begun(self, files: CampaignFiles, runs: Sequence[RunPlan], workers: int) -> None:
        """Launching begins; `runs` are those still to do."""

    def asked(self, runs: Sequence[RunPlan]) -> None:
        """Further runs are needed, of a campaign that adds seeds."""

    def started(self, run: RunPlan) -> None:
        """A worker was started, or found alive and adopted."""

    def ended(self, run: RunPlan, ending: Ending, tail: Sequence[str]) -> None:
        """A run ended and is not retried; `tail` is the end of its output if it failed."""

    def retrying(self, run: RunPlan, ending: Ending, delay_s: float) -> None:
        """A run is retried after a delay."""

    def notice(self, text: str) -> None:
        """A message for the user."""
