"""One run that Ray is to work on: what a look at its jobs means for it. Ray's word is a hint.

What holds for every engine is in `_engine_watch`.
"""

from __future__ import annotations

from contextlib import suppress

from retrain.errors import EXIT_DONE, RecordsError
from retrain.launchers import Begun, Ended
from retrain.launchers._ray_client import BY_COMMAND, Job, said_of
from retrain.launchers._ray_marks import Taken
from retrain.launchers.engine_watch import EngineWatch, is_alive, is_finished, why_without_a_word
from retrain.records.atomic import write_atomic
from retrain.records.layout import RunFiles


class Watch(EngineWatch):
    """A run in Ray's hands, or in the queue for them."""

    def __init__(self, number: int) -> None:
        """Watch a run's job by its number; 0: a worker that is alive though Ray has no job of it."""
        super().__init__()
        self.number = number
        self.job = ""  # the id of the one that works on it, once that is known
        self.has_place = number == 0

    def look(self, run_id: str, files: RunFiles, job: Job | None, taken: Taken | None) -> list[Begun | Ended]:
        """Return what has happened.

        Args:
            run_id: of the run.
            files: the run's.
            job: the one that works on it; None if Ray knows none.
            taken: by whom it was taken on; None if nobody has.
        """
        if is_finished(files):
            self.has_place = True
            return [*self.begin(run_id), Ended(run_id, EXIT_DONE)]
        if taken is not None and taken.is_settled and not is_alive(files):
            return self._settled(run_id, files, taken)
        if job is None:
            return self._without_job(run_id, files, taken)
        self.found()
        self.has_place = True
        if job.waits:
            return []
        begun = self.begin(run_id)
        if not job.is_over or is_alive(files):
            return begun
        if job.status == "SUCCEEDED" and not self.has_arrived(files):
            return begun
        return [*begun, ended(run_id, files, job)]

    def _settled(self, run_id: str, files: RunFiles, taken: Taken) -> list[Begun | Ended]:
        self.has_place = True
        begun = self.begin(run_id)
        if taken.exit_code == EXIT_DONE and not self.has_arrived(files):
            return begun
        return [*begun, Ended(run_id, taken.exit_code)]

    def _without_job(self, run_id: str, files: RunFiles, taken: Taken | None) -> list[Begun | Ended]:
        if taken is None and self.number:
            self.found()
            self.has_place = False
            return []
        self.has_place = True
        if is_alive(files):
            self.found()
            return self.begin(run_id)
        return self.missed(run_id, f"Ray knows nothing of {'its job' if self.number else 'its worker'}")


def ended(run_id: str, files: RunFiles, job: Job) -> Ended:
    """Return how a job ended, in Ray's words where its worker may have left none."""
    why = said_of(job) + (why_without_a_word(files) if job.status == "FAILED" else "")
    is_lost = job.status == "FAILED" and job.error != BY_COMMAND
    stopped = job.status == "STOPPED"
    return Ended(run_id, None, why, goes_on=is_lost, is_lost=is_lost, taken_back=stopped)


def keep_words(files: RunFiles, job: Job | None) -> None:
    """Keep what Ray itself said of a job for `retrain logs`; of others the worker's output tells more."""
    if job is None or job.status != "FAILED" or (job.error == BY_COMMAND and files.output_log.exists()):
        return
    with suppress(RecordsError):  # a missing directory or a full disk: whoever concludes says so
        write_atomic(files.directory / f"engine-{job.id}.out", job.message + "\n")
