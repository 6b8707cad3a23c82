"""Signs, step by step, that a run needs a look: its policies drift apart, or nothing is learned."""

from __future__ import annotations

import logging
from dataclasses import replace

from retrain.control.rules import StateDict
from retrain.control.rules.first_steps import FirstSteps
from retrain.control.rules.mismatch import MismatchTrend
from retrain.control.rules.no_signal import NOTABLE, SignalWatch
from retrain.records.step_row import Signs, StepRow
from retrain.trainer.part import Loop, Part, TakenStep

log = logging.getLogger(__name__)


class StepSigns(Part):
    """Follows how sampler and trainer differ, and how long there has been no signal.

    It also digests the results of a run's first steps, by which runs that did the same are known.
    """

    name = "signs"

    def __init__(self, lr: float) -> None:
        self._lr = lr
        self._mismatch = MismatchTrend()
        self._signal = SignalWatch()
        self._first_steps = FirstSteps()

    def after_step(self, loop: Loop, taken: TakenStep, row: StepRow) -> StepRow:
        """Warn of what became notable with the step; return its row with the signs."""
        mismatch, is_trained = taken.stats.mismatch, taken.trained_groups > 0
        if mismatch and (rise := self._mismatch.observe(mismatch.kl, taken.number)):
            log.warning("%s; algorithm.ratio_cap limits what that does to the gradient", rise)
        no_signal = self._signal.observe(
            taken.number, taken.rollouts, trained=is_trained, entropy=taken.entropy
        )
        if no_signal and self._signal.steps == NOTABLE:
            log.warning("%s", no_signal)
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
            mismatch_rise=self._mismatch.rise or None, no_signal=no_signal or None, first_steps=digest or None
        )
        return replace(row, signs=signs)

    def state_dict(self) -> StateDict:
        return {
            "mismatch": self._mismatch.state_dict(),
            "signal": self._signal.state_dict(),
            "first_steps": self._first_steps.state_dict(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        self._mismatch.load_state_dict(state["mismatch"])
        self._signal.load_state_dict(state["signal"])
        self._first_steps.load_state_dict(state["first_steps"])
