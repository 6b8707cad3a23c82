"""The events of a campaign, for observers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from retrain.campaign.endings import Ending
from retrain.plan.matrix import RunPlan
from retrain.records.layout import CampaignFiles


class Observer(Protocol):
    """Observes a campaign. Called from the orchestrator's thread; must return soon."""

    def begun(self, files: CampaignFiles, runs: Sequence[RunPlan], workers: int) -> None:
        """Launching begins; `runs` are those still to do."""
        ...

    def started(self, run: RunPlan) -> None:
        """A worker was started, or found alive and adopted."""
        ...

    def ended(self, run: RunPlan, ending: Ending, tail: Sequence[str]) -> None:
        """A run ended and is not retried; `tail` is the end of its output if it failed."""
        ...

    def retrying(self, run: RunPlan, ending: Ending, delay_s: float) -> None:
        """A run is retried after a delay."""
        ...

    def notice(self, text: str) -> None:
        """A message for the user."""
        ...


class Silent:
    """An observer that ignores everything."""

    def begun(self, files: CampaignFiles, runs: Sequence[RunPlan], workers: int) -> None:
        """Ignore."""

    def started(self, run: RunPlan) -> None:
        """Ignore."""

    def ended(self, run: RunPlan, ending: Ending, tail: Sequence[str]) -> None:
        """Ignore."""

    def retrying(self, run: RunPlan, ending: Ending, delay_s: float) -> None:
        """Ignore."""

    def notice(self, text: str) -> None:
        """Ignore."""
