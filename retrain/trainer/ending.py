"""How far a run goes: to its last step, the end of what is compared, or a rung at which it waits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from retrain.control.rules import StateDict
from retrain.records.lines import measured
from retrain.records.rungs import read_wait, why_to_wait
from retrain.records.step_row import StepRow
from retrain.records.windows import AXES, STEPS
from retrain.trainer.part import Due, Loop, Part, TakenStep
from retrain.trainer.source import Source


class Ending(Part):
    """Ends a run after `max_steps`, or with the first step that comes to an amount of an axis.

    Or stops it at the rung that the orchestrator has written down, on that axis.
    """

    name = "spent"

    def __init__(
        self, rung: Path, source: Source, max_steps: int, per: str = STEPS, end: float = 0.0
    ) -> None:
        """End at `end` of an axis other than steps, unless it is 0, and after `max_steps`."""
        self._rung, self._source, self._max_steps = rung, source, max_steps
        self._per, self._end, self._reached = per, end or math.inf, 0.0

    def is_over(self, step: int) -> bool:
        return step >= self._max_steps or self._reached >= self._end

    def before_step(self, loop: Loop) -> None:
        """Have nothing sampled for steps that are not to come."""
        self._source.end_at(int(read_wait(self._rung)) or self._max_steps)

    def why_to_stop(self, step: int, due: Sequence[Due] = (), *, is_step: bool = True) -> str:
        return why_to_wait(self._rung, step if self._per == STEPS else self._reached, self._per)

    def after_step(self, loop: Loop, taken: TakenStep, row: StepRow) -> StepRow:
        columns, axis = row.columns(), AXES[self._per]
        self._reached += axis.amount(*(measured(columns.get(key)) for key in axis.keys))
        return row

    def state_dict(self) -> StateDict:
        return {"reached": self._reached}

    def load_state_dict(self, state: StateDict) -> None:
        self._reached = state["reached"]
