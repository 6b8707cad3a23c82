"""A step: how it is to be run, and what was measured of it once it was taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from retrain.backends import UpdateStats
from retrain.base.errors import RetrainError
from retrain.control.rules.throttle import ThrottleState
from retrain.records.row_parts import ApiPause
from retrain.records.samples import KeptSample
from retrain.records.spending import Tokens
from retrain.records.step_row import RolloutSummary, ScalingDecision, Timing
from retrain.trainer.batch import ScoredBatch


@dataclass(frozen=True, slots=True)
class StepSize:
    """How to run the next step, and why."""

    batch_size: int  # prompts of the step
    at_a_time: int  # prompts sampled and trained on at a time
    parts: int  # micro-batches of an optimizer step: at least its prompts / at_a_time
    lr_factor: float
    gpu_fraction: float
    wants_moments: bool  # whether the noise scale is estimated
    scaling: ScalingDecision
    load: ThrottleState | None
    load_wait_s: float  # before the step, while the load allowed nothing


@dataclass(slots=True)
class TakenStep:
    """A step that was just taken: what controllers and parts learn from it."""

    number: int  # from 1
    size: StepSize
    batch: ScoredBatch
    timing: Timing
    rollouts: RolloutSummary
    stats: UpdateStats
    trained_groups: int  # with a gradient; with a KL term or an entropy bonus, tied groups too
    entropy: float | None  # of the tokens as sampled, in nats
    billed: Tokens  # of its updates
    samples: Sequence[KeptSample]  # for people to read
    pause: ApiPause | None = None
    leave_with: str | RetrainError | None = None  # set: leave once its row is written; see `Loop.leave`

    @property
    def active_s(self) -> float:
        """The step's time without the pauses of an API, which say nothing about its size."""
        paused_s = self.pause.pause_s if self.pause else 0.0
        return max(self.timing.step_time_s - paused_s, 0.01 * self.timing.step_time_s)


def is_due(every: int, done: int) -> bool:
    """Whether what comes every so many steps comes after so many; 0 is never."""
    return every > 0 and done % every == 0
