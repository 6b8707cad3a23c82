"""Signs, step by step, that a run needs a look: its policies drift apart, nothing is learned or scored."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace

import numpy as np

from retrain.base.errors import UnscoredStepError
from retrain.base.redaction import redacted
from retrain.control.rules import StateDict
from retrain.control.rules.signs import NOTABLE_STEPS, FirstSteps, MismatchTrend, SignalWatch, TeacherSupport
from retrain.records.step_row import Signs, StepRow, Unscored
from retrain.records.text import plain
from retrain.trainer.batch import ScoredBatch
from retrain.trainer.part import Loop, Part, TakenStep

log = logging.getLogger(__name__)


class StepSigns(Part):
    """Follows how sampler, trainer and teacher differ, and how long there has been no signal.

    It also digests the results of a run's first steps, by which runs that did the same are known.
    """

    name = "signs"

    def __init__(self, lr: float) -> None:
        self._lr = lr
        self._mismatch = MismatchTrend()
        self._signal = SignalWatch()
        self._first_steps = FirstSteps()
        self._teacher, self._outside_teacher = TeacherSupport(), ""

    def after_step(self, loop: Loop, taken: TakenStep, row: StepRow) -> StepRow:
        """Warn of what became notable with the step; return its row with the signs."""
        mismatch, is_trained = taken.stats.mismatch, taken.trained_groups > 0
        if mismatch and (rise := self._mismatch.observe(mismatch.kl, taken.number)):
            log.warning("%s; algorithm.ratio_cap limits what that does to the gradient", rise)
        no_signal = ""
        if row.teacher is None:
            no_signal = self._signal.observe(
                taken.number, taken.rollouts, trained=is_trained, entropy=taken.entropy
            )
        if no_signal and self._signal.steps == NOTABLE_STEPS:
            log.warning("%s", no_signal)
        if row.teacher is not None:
            outside = self._teacher.observe(row.teacher.outside, taken.number)
            if outside and not self._outside_teacher:
                log.warning("%s", outside)
            self._outside_teacher = outside
        rollouts, stats = taken.rollouts, taken.stats
        results = [  # that no clock decides
            taken.size.batch_size,
            self._lr * taken.size.lr_factor,
            rollouts.mean_reward,
            rollouts.reward_std,
            rollouts.correct_rate,
            rollouts.tokens_per_step,
            stats.loss,
            stats.grad_norm,
            stats.entropy,
            stats.clip_fraction,
            stats.approx_kl,
        ]
        digest = self._first_steps.observe(results, trained=is_trained)
        signs = Signs(
            mismatch_rise=self._mismatch.rise or None,
            no_signal=no_signal or None,
            outside_teacher=self._outside_teacher or None,
            first_steps=digest or None,
        )
        return replace(row, signs=signs)

    def state_dict(self) -> StateDict:
        return {
            "mismatch": asdict(self._mismatch),
            "signal": asdict(self._signal),
            "first_steps": asdict(self._first_steps),
            "teacher": asdict(self._teacher),
        }

    def load_state_dict(self, state: StateDict) -> None:
        self._mismatch = MismatchTrend(**state["mismatch"])
        self._signal = SignalWatch(**state["signal"])
        self._first_steps = FirstSteps(**state["first_steps"])
        self._teacher = TeacherSupport(**state["teacher"])


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
        row = replace(row, unscored=self.add(taken.batch.everything))
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
        for score in (score for score in batch.marked.values() if score.value is None):
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
