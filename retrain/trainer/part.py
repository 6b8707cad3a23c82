"""What attaches to the loop of a run: a capability, complete when it is made, and with one life.

And what the loop tells it: of the next step and the last one, and of evaluations that are due.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NoReturn, Protocol

from retrain.backends import UpdateStats
from retrain.base.errors import RetrainError
from retrain.base.rollouts import Prompt
from retrain.config.prices import Price
from retrain.config.resolve import longest_played
from retrain.config.schema import Config, EnvironmentSection
from retrain.control.rules import StateDict
from retrain.control.rules.throttle import ThrottleState
from retrain.records.row_parts import ApiPause, Value
from retrain.records.samples import KeptSample
from retrain.records.spending import Tokens
from retrain.records.step_row import RolloutSummary, ScalingDecision, StepRow, Timing
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


@dataclass(frozen=True)
class Due:
    """An evaluation that is due."""

    name: str  # of its `[[eval]]`; "" for the run's own
    prompts: Sequence[Prompt]
    samples: int  # completions per prompt
    max_tokens: int
    played: EnvironmentSection
    trained: Config

    @property
    def size(self) -> str:
        """What it asks for, in words: another size costs something else."""
        turns = "" if self.played.is_single_turn else f", {self.played.max_turns} turns"
        read = sum(prompt.tokens_at_most for prompt in self.prompts)
        return (
            f"{len(self.prompts)} prompts of {read} bytes x {self.samples} x {self.max_tokens} tokens{turns}"
        )

    def at_most_usd(self, price: Price, rollout_usd: float) -> float:
        """Return what it costs if no completion is dearer than a rollout that a step also trained on.

        Where it allows more tokens or turns than a step, each completion may be as much dearer. Before the
        first step, with `rollout_usd` 0, each is as long as it may be; what further turns read is not known.
        """
        table, environment = self.trained.training, longest_played(self.trained)
        each_usd = rollout_usd * max(1.0, self.max_tokens / table.max_tokens)
        longest_usd = Tokens(sample=self.max_tokens).usd(price)
        if not rollout_usd:
            each_usd = longest_usd * (1 if self.played.is_single_turn else self.played.max_turns)
        elif self.played.is_single_turn:
            each_usd = min(each_usd, longest_usd)
        elif self.played != environment:
            each_usd *= self.played.max_turns
        system = len(str(self.trained.backend.options.get("system_prompt", "")).encode())
        read = Tokens(prefill=sum(prompt.tokens_at_most + system for prompt in self.prompts)).usd(price)
        return self.samples * (read + len(self.prompts) * each_usd)


class Loop(Protocol):
    """What a part may ask of the loop that it is attached to."""

    step: int  # how many are complete

    def is_over(self, step: int) -> bool:
        """Whether the run is done after so many steps, as far as any part knows."""

    def before_step(self, due: Sequence[Due] = ()) -> None:
        """Have every part wait until a step may be taken, then leave if there is a reason to.

        Args:
            due: the evaluations that come after the step.
        """

    def leave_if_due(self, due: Sequence[Due] = (), *, is_step: bool = True) -> None:
        """Leave if a stop was requested, or any part says why to stop."""

    def leave(self, why: str | RetrainError = "") -> NoReturn:
        """Save a checkpoint and end this attempt: as one that was stopped, or with an error of its own."""

    def changed(self) -> None:
        """Note that the policy was changed, so that the next `save` writes a checkpoint."""

    def save(self) -> None:
        """Write a checkpoint, unless one of the same policy was written."""

    def amend(self) -> None:
        """Replace, in the checkpoint of this policy, what changes between steps; nothing without one."""


class Part:
    """A capability of a run; it overrides what it needs.

    The loop calls its parts in the order in which they are attached, and closes them in reverse.
    """

    name: ClassVar[str] = ""  # of its state in a checkpoint; "" if it has none
    changes_between_steps: ClassVar[bool] = False  # whether its state does, as after an evaluation

    def begin(self, loop: Loop) -> None:
        """Act once before the first step of an attempt, after the newest checkpoint was restored."""

    def before_step(self, loop: Loop) -> None:
        """Act before each step, such as wait until it may be taken."""

    def is_over(self, step: int) -> bool:
        """Whether the run is done after so many steps, those taken or one more.

        All evaluations follow, then `finish`. Once true of the steps taken, it stays so after a resume.
        """
        return False

    def due(self, loop: Loop, step: int) -> Sequence[Due]:
        """Return the evaluations that come after so many steps and were not made yet."""
        return ()

    def why_to_stop(self, step: int, due: Sequence[Due] = (), *, is_step: bool = True) -> str:
        """Return why the run stops after so many steps, before what comes next; "" if it need not.

        It is interrupted, and a resume goes on; see `is_over` for a run that is done.

        Args:
            due: the evaluations that come next, of all parts.
            is_step: whether a step comes before them.
        """
        return ""

    def after_step(self, loop: Loop, taken: TakenStep, row: StepRow) -> StepRow:
        """Learn from a step; return its row with this part's columns."""
        return row

    def finish(self, loop: Loop) -> Mapping[str, Value]:
        """Act once after the last step; return what the run's result says of this part."""
        return {}

    def sync(self) -> None:
        """Write to disk what the checkpoint that comes next depends on."""

    def state_dict(self) -> StateDict:
        """Return all that later steps depend on, as JSON takes it."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore what `state_dict` returned; not called where the checkpoint has nothing of this part."""

    def close(self) -> None:
        """Give up what it holds, also after an error; called once."""
