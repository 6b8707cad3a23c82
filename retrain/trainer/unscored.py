"""Completions without a score: counted over a run, which stops where its scorer is away for long."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np

from retrain.base.errors import UnscoredStepError
from retrain.base.redaction import redacted
from retrain.control.rules import StateDict
from retrain.records.step_row import StepRow, Unscored
from retrain.records.text import plain
from retrain.trainer.batch import ScoredBatch
from retrain.trainer.part import Loop, Part, TakenStep

OUTAGE_STEPS = 10  # a judge that restarts is back by then; more would train on a minority for nothing


@dataclass
class Counts:
    """The completions of a run so far; the state in a checkpoint."""

    rollouts: int = 0
    unscored: int = 0
    outages: int = 0  # of them, by a scorer that failed or timed out
    reason: str = ""  # why the first of them has no score
    outage_steps: int = 0  # in a row, in which more than `max_unscored` had no score by outages
    last_outage: str = ""  # why


class UnscoredCount(Part):
    """Counts the completions of a run that have no score."""

    name = "unscored"

    def __init__(self, max_unscored: float = 1.0) -> None:
        """Prepare; `max_unscored` is that of `[training]`."""
        self._max_unscored = max_unscored
        self.counts = Counts()

    def after_step(self, loop: Loop, taken: TakenStep, row: StepRow) -> StepRow:
        """Count a step; the run leaves with an error where its scorer is away and more steps would follow.

        The count stays in the checkpoint: the next attempt goes on once a step of it is better.
        """
        row = replace(row, unscored=self.add(taken.batch))
        if not (loop.is_over(taken.number) or taken.leave_with) and (outage := self.outage()):
            taken.leave_with = outage
        return row

    def add(self, batch: ScoredBatch) -> Unscored | None:
        """Count a step's completions; return the run's figures, None while all have a score."""
        counts, size, outages = self.counts, batch.rewards.size, batch.outages
        counts.rollouts += size
        counts.unscored += int(np.count_nonzero(~batch.scored))
        counts.outages += outages
        counts.outage_steps = counts.outage_steps + 1 if outages > self._max_unscored * size else 0
        for score in batch.unscored.values():
            message = plain(redacted(score.message))
            counts.reason = counts.reason or message
            counts.last_outage = message if score.is_outage else counts.last_outage
        if not counts.unscored:
            return None
        return Unscored(
            fraction=counts.unscored / counts.rollouts,
            outage_fraction=counts.outages / counts.rollouts,
            reason=counts.reason,
        )

    def outage(self) -> UnscoredStepError | None:
        """Return the error of `OUTAGE_STEPS` steps in a row of which most completions met an outage."""
        if self.counts.outage_steps < OUTAGE_STEPS:
            return None
        return UnscoredStepError(
            f"the scorer failed or timed out for more than {self._max_unscored:.0%} of the completions in "
            f"each of the last {self.counts.outage_steps} steps (training.max_unscored); the last one: "
            f"{self.counts.last_outage}"
        )

    def state_dict(self) -> StateDict:
        return asdict(self.counts)

    def load_state_dict(self, state: StateDict) -> None:
        self.counts = Counts(**state)
