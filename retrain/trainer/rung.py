"""The rung at which a run of a search waits until it is known whether it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from retrain.records.rungs import read_wait, why_to_wait
from retrain.trainer.part import Due, Loop, Part
from retrain.trainer.source import Source


class Rung(Part):
    """Stops a run at the step that the orchestrator has written down, and samples for none after it."""

    def __init__(self, file: Path, source: Source, max_steps: int) -> None:
        self._file, self._source, self._max_steps = file, source, max_steps

    def before_step(self, loop: Loop) -> None:
        self._source.end_at(read_wait(self._file) or self._max_steps)

    def why_to_stop(self, step: int, due: Sequence[Due] = (), *, is_step: bool = True) -> str:
        return why_to_wait(self._file, step)
