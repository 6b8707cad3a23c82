"""Runs that a stop interrupted are no lost seeds: nothing is decided from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from retrain.base.errors import EXIT_INTERRUPTED
from retrain.campaign import Observer
from retrain.campaign.run import start
from tests.long.test_decision import DECISION, decision_of, verdicts

PARALLEL = ("campaign.launcher=local", "campaign.parallel=true", "campaign.max_workers=6")
TWO_CONDITIONS = DECISION.partition('[[campaign.conditions]]\nname = "alike"')[0]


class StopOnceStarted(Observer):
    """Asks the campaign to stop once so many runs have started."""

    def __init__(self, runs: int) -> None:
        self.left = runs
        self.stop: Callable[[], None] = lambda: None

    def started(self, *_: object) -> None:
        self.left -= 1
        if self.left == 0:
            self.stop()


def test_interrupted_runs_end_no_decision(here: Path) -> None:
    path, observer = here / "decision.toml", StopOnceStarted(6)
    path.write_text(TWO_CONDITIONS)
    settings = (*PARALLEL, "campaign.max_steps=100000", "decision.max_seeds=3")
    campaign = start(path, settings, observer)
    observer.stop = campaign.stop
    outcome = campaign.execute()
    found = decision_of(outcome.directory)
    assert outcome.exit_code == EXIT_INTERRUPTED
    assert (found.ended, found.saved_runs, verdicts(found)) == ("", 0, {"bonus": ("continue", 0)})
