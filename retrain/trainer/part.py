"""What attaches to the loop of a run: a capability, complete when it is made, and with one life."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, NoReturn, Protocol

from retrain.base.errors import RetrainError
from retrain.control.rules import StateDict
from retrain.records.row_parts import Value
from retrain.records.step_row import StepRow
from retrain.trainer.evaluation import Due
from retrain.trainer.step import TakenStep


class Loop(Protocol):
    """What a part may ask of the loop that it is attached to."""

    @property
    def step(self) -> int:
        """How many steps are complete."""

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

    def due(self, step: int) -> Sequence[Due]:
        """Return the evaluations that come after so many steps and were not made yet."""
        return ()

    def why_to_stop(self, step: int, due: Sequence[Due] = (), *, is_step: bool = True) -> str:
        """Return why the run stops after so many steps, before what comes next; "" if it need not.

        It is interrupted, and a resume goes on: a run is done after `max_steps` only, on which evaluations,
        searches and comparisons rely.

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
