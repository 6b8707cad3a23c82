"""One run that Slurm was given: what a look at the queue means for it.

What holds for every engine is in `_engine_watch`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from retrain.errors import EXIT_DONE
from retrain.launchers import Begun, Ended
from retrain.launchers.engine_watch import EngineWatch, is_alive, is_finished, why_without_a_word
from retrain.launchers.slurm.queue import LOST, USUAL_REASONS, Task
from retrain.records.layout import RunFiles


class Watch(EngineWatch):
    """A run in Slurm's hands."""

    def __init__(self, job: int) -> None:
        """Watch a task of a job; 0: a worker that is alive though Slurm has no task of it."""
        super().__init__()
        self.job = job

    def look(
        self, run_id: str, files: RunFiles, task: Task | None, cancelled: Collection[int] = ()
    ) -> list[Begun | Ended]:
        """Return what happened, from the run's newest task and the jobs cancelled as a whole."""
        if is_finished(files):
            return [*self.begin(run_id), Ended(run_id, EXIT_DONE)]
        if task is None or task.job < self.job:
            if self.job in cancelled:
                return [Ended(run_id, None, f"Slurm ended job {self.job}: CANCELLED", taken_back=True)]
            return self._without_task(run_id, files)
        self.found()
        self.job = task.job
        if not task.is_over:
            return [] if task.waits else self.begin(run_id)
        if task.state == "COMPLETED" and not self.has_arrived(files):
            return []
        return [*self.begin(run_id), _ended(run_id, files, task)]

    def _without_task(self, run_id: str, files: RunFiles) -> list[Begun | Ended]:
        if is_alive(files):
            self.found()
            return self.begin(run_id)
        what = f"task {self.job} of it" if self.job else "its worker"
        return self.missed(run_id, f"Slurm knows nothing of {what}")


def held_back(tasks: Iterable[Task]) -> dict[str, int]:
    """Count tasks that wait for something which waiting may never bring, by Slurm's reason."""
    waiting = (task.reason for task in tasks if task.waits)
    return dict(Counter(reason for reason in waiting if reason not in USUAL_REASONS))


def _ended(run_id: str, files: RunFiles, task: Task) -> Ended:
    was_cancelled = task.state == "CANCELLED"
    reason = f" ({task.reason})" if task.reason not in ("None", "") else ""
    why = f"Slurm ended task {task.label}: {task.state}{reason}"
    if not was_cancelled:
        why += why_without_a_word(files)
    is_lost = task.state in LOST
    return Ended(run_id, None, why, goes_on=not was_cancelled, is_lost=is_lost, taken_back=was_cancelled)
