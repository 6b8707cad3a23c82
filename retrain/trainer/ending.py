"""How far a run goes: to its last step, or to the rung at which a search lets it wait."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from retrain.records.rungs import read_wait, why_to_wait
from retrain.trainer.part import Due, Loop, Part
from retrain.trainer.source import Source


class Ending(Part):
    """Ends a run after `max_steps`, or stops it at the rung that the orchestrator has written down."""

    def __init__(self, rung: Path, source: Source, max_steps: int) -> None:
        self._rung, self._source, self._max_steps = rung, source, max_steps

    def is_over(self, step: int) -> bool:
        return step >= self._max_steps

    def before_step(self, loop: Loop) -> None:
        """Have nothing sampled for steps that are not to come."""
        self._source.end_at(read_wait(self._rung) or self._max_steps)

    def why_to_stop(self, step: int, due: Sequence[Due] = (), *, is_step: bool = True) -> str:
        return why_to_wait(self._rung, step)
