"""How many tasks an array runs at a time while workers are alive that no task of ours stands for.

A controller that forgot its queue leaves such workers, and so does another launcher. An array that is
submitted beside them gets the places that they leave, and theirs when they have ended.
"""

from __future__ import annotations

from collections.abc import Callable

from retrain.errors import EngineDownError, LaunchError
from retrain.launchers.slurm import commands


class Caps:
    """The arrays whose cap is lower than the campaign's."""

    def __init__(self, workers: int, say: Callable[[str], None]) -> None:
        self._workers = workers
        self._say = say
        self._lowered: dict[int, int] = {}

    def submitted(self, job: int, cap: int) -> None:
        """Take note of an array's cap."""
        if cap < self._workers:
            self._lowered[job] = cap

    def lift(self, cap: int) -> None:
        """Raise those that are lower than need be; asked again if Slurm does not answer."""
        for job in [job for job, lowered in self._lowered.items() if lowered < cap]:
            try:
                commands.set_cap(job, cap)
            except EngineDownError:
                return
            except LaunchError as error:
                self._say(f"{error}; job {job} keeps to {self._lowered.pop(job)} at a time")
            else:
                self._lowered.pop(job)
                self.submitted(job, cap)
