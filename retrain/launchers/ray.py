"""Jobs of a Ray cluster: one job per run and attempt, at most so many with Ray at a time.

Ray's Jobs API has neither arrays nor a cap, and by default fails a job that has waited for 15 minutes.
So Ray is given as many jobs as there may be workers, and each job that ends submits the next run, or does
it itself (`_ray_place`): the campaign goes on when this process is gone, and nothing must be set up on the
cluster. `_ray_queue` says how two that submit at once agree. One question answers for all jobs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from retrain.config.engines import Ray
from retrain.config.resolve import build
from retrain.errors import LaunchError, RecordsError
from retrain.launchers import Assignment, Begun, Ended
from retrain.launchers._ray_checks import check_campaign, check_engine, require_packages
from retrain.launchers._ray_client import NO_ROOM, Client, Job, check_environment
from retrain.launchers._ray_local import Local
from retrain.launchers._ray_marks import Taken
from retrain.launchers._ray_proof import LockTest
from retrain.launchers._ray_queue import Queue
from retrain.launchers._ray_script import render, shown, terms_of
from retrain.launchers._ray_watch import Watch, keep_words
from retrain.launchers.asking import Asking
from retrain.launchers.engine_watch import is_alive
from retrain.launchers.permit_split import workers_at_a_time
from retrain.launchers.signals import signal_worker
from retrain.records.atomic import write_atomic
from retrain.records.layout import RunFiles

__all__ = ["RayLauncher", "at_a_time", "check_campaign", "check_engine", "open_launcher", "script"]

EXTRA = "ray"
PACKAGES = ("ray", "aiohttp")


def open_launcher(assignment: Assignment) -> RayLauncher:
    """Return a launcher of Ray jobs.

    Raises:
        LaunchError: the extra is not installed, or refuses the runtime environment.
    """
    require_packages()
    table = build(Ray, assignment.options)
    check_environment(table.runtime_env)
    return RayLauncher(assignment, table)


def at_a_time(assignment: Assignment) -> int:
    """Return the cap."""
    return workers_at_a_time(assignment, build(Ray, assignment.options).permits)


def script(assignment: Assignment) -> str:
    """Return what would be submitted."""
    return shown(assignment, build(Ray, assignment.options))


class RayLauncher:
    """Submits, watches and stops a campaign's jobs."""

    queues = True

    def __init__(self, assignment: Assignment, table: Ray) -> None:
        self._assignment = assignment
        self._table = table
        self._workers = workers_at_a_time(assignment, table.permits)
        self._queue = Queue(assignment.directory)
        self._local = Local(self._queue.home) if table.address == "local" else None
        self._client = Client(self._local.address if self._local else table.address)
        self._order = {run_id: number for number, run_id in enumerate(assignment.runs)}
        self._watched: dict[str, Watch] = {}
        self._jobs: Mapping[str, Job] = {}  # this campaign's, by id, at the last look
        self._numbers: Mapping[str, int] = {}  # of the runs that an earlier orchestrator wanted
        self._to_cancel: dict[str, bool] = {}
        self._stopped: set[str] = set()  # jobs that Ray was asked to stop
        self._asking = Asking("Ray", table.poll_seconds, assignment.say)
        self._said: set[str] = set()

    def describe(self) -> str:
        """Return where workers execute."""
        return f"Ray, {self._workers} at a time"

    def room(self) -> int:
        """Return what the cap leaves; runs in the queue have taken their places already."""
        return max(0, self._workers - len(self._watched))

    def submit(self, run_ids: Sequence[str]) -> Collection[str]:
        """Put runs into the queue, and give Ray as many as have a place."""
        if not self._prepare():
            return ()
        if not self._asking.is_fresh:
            self._jobs = self._ask()
        if self._local is not None:
            self._local.start(self._assignment.say)
        newest = self._queue.newest(self._jobs)
        for run_id in run_ids:
            self._watched[run_id] = Watch(newest.get(run_id, 0) + 1)
        try:
            self._write_wanted()
            self._fill()
        except (LaunchError, RecordsError) as error:
            if not any(self._watched[run_id].has_place for run_id in run_ids):
                self._forget(run_ids)
                raise
            self._assignment.say(f"{error}; the rest is submitted later")
        self._asking.postpone()
        return run_ids

    def queued(self) -> Collection[str]:
        """Ask Ray for the campaign's jobs that are not over, and are wanted."""
        self._jobs = self._ask()
        self._numbers = self._wanted_numbers()
        for run_id, number in self._numbers.items():
            self._retire_forgotten(self._queue.marks.read(run_id, number))
        return {run_id for run_id, number in self._numbers.items() if self._is_live(run_id, number)}

    def adopt(self, run_ids: Sequence[str]) -> None:
        """Watch runs that Ray has, and runs that are alive without a job."""
        for run_id in run_ids:
            number = self._numbers.get(run_id, 0)
            is_live = self._is_live(run_id, number)
            watch = self._watched[run_id] = Watch(number if is_live else 0)
            watch.job = self._queue.job_of(run_id, number) if is_live else ""
            watch.has_place = True

    def poll(self, timeout_s: float) -> Sequence[Begun | Ended]:
        """Wait for the next look, and say what it showed."""
        return self._look() if self._asking.wait(timeout_s) else []

    def wake(self) -> None:
        """Make `poll` return."""
        self._asking.wake()

    def cancel(self, run_ids: Sequence[str], *, now: bool) -> None:
        """Take back what has not started; send SIGTERM to workers, or have them killed where they run."""
        self._to_cancel |= {run_id: now for run_id in run_ids if run_id in self._watched}
        self._write_wanted()  # first: a job that starts after this leaves at once
        for run_id, at_once in self._to_cancel.items():
            if at_once:
                self._queue.mark_killed(run_id, self._watched[run_id].number)
        self._asking.hurry()

    # Submitting

    def _prepare(self) -> bool:
        """Write what jobs need; False if somebody wants to leave before permits are known to be safe."""
        test = LockTest(self._assignment, self._table, self._queue, self._client)
        node = test.node(self._asking.rest)
        if node is None:
            return False
        if node:
            self._say_once(f"only node {node} is large enough for a run, so all runs keep to it")
        self._queue.prepare(terms_of(self._assignment, self._table, node))
        write_atomic(self._queue.home / "job.sh", render(self._assignment, self._table))
        if self._assignment.gpu_runs and not self._table.gpus:
            seeing = len(self._assignment.gpu_runs)
            self._say_once(f"{seeing} runs train on what GPUs they see, and Ray shows them none: gpus = 0")
        return True

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._assignment.say(text)
            self._said.add(text)

    def _write_wanted(self) -> None:
        wanted = [run_id for run_id in self._watched if run_id not in self._to_cancel]
        wanted.sort(key=self._order.__getitem__)
        self._queue.want({run_id: self._watched[run_id].number for run_id in wanted})

    def _fill(self) -> None:
        for run_id in self._queue.fill(self._client, self._workers - len(self._places())):
            watch = self._watched[run_id]
            watch.has_place, watch.job = True, self._queue.id_of(run_id, watch.number)

    def _places(self) -> set[str]:
        """Name who has a place: each job of Ray's that is not over, and each run that may have one yet."""
        live = {name for name, job in self._jobs.items() if not job.is_over}
        return live | {watch.job or run_id for run_id, watch in self._watched.items() if watch.has_place}

    def _forget(self, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            del self._watched[run_id]
        with suppress(RecordsError):  # then a job may take one of them on, which who submits it again finds
            self._write_wanted()

    # Looking

    def _ask(self) -> Mapping[str, Job]:
        try:
            if self._local is not None and not self._local.is_running:
                return {}
            jobs = {job.id: job for job in self._client.jobs() if self._queue.parse(job.id) is not None}
        finally:
            self._asking.asked()
        return {name: job for name, job in jobs.items() if self._queue.is_ours(job)}

    def _wanted_numbers(self) -> dict[str, int]:
        """Return the newest number of each wanted run: others replace jobs that were lost."""
        newest = self._queue.marks.newest()
        return {r: max(number, newest.get(r, 0)) for r, number in self._queue.wanted().items()}

    def _retire_forgotten(self, taken: Taken | None) -> None:
        if taken is not None and not taken.is_settled and taken.job not in self._jobs:
            self._queue.retire(taken.job)

    def _is_live(self, run_id: str, number: int) -> bool:
        taken = self._queue.marks.read(run_id, number)
        job = self._jobs.get(self._queue.job_of(run_id, number))
        return job is not None and not job.is_over and not (taken is not None and taken.is_settled)

    def _look(self) -> list[Begun | Ended]:
        try:
            self._jobs = self._ask()
            self._stop_wanted()
            happened = self._see()
            self._fill()
        except (LaunchError, RecordsError) as error:
            self._asking.unanswered(error)
            happened = self._taken_back()
        else:
            self._asking.answered()
        return happened

    def _see(self) -> list[Begun | Ended]:
        newest = self._queue.marks.newest()
        happened: list[Begun | Ended] = []
        self._wait_again()
        for run_id, watch in list(self._watched.items()):
            news = self._see_run(run_id, newest.get(run_id, 0))
            if news and isinstance(news[-1], Ended):
                keep_words(RunFiles(self._assignment.runs[run_id]), self._jobs.get(watch.job))
                self._drop(run_id)
            happened += news
        return happened

    def _see_run(self, run_id: str, newest: int) -> list[Begun | Ended]:
        watch, files = self._watched[run_id], RunFiles(self._assignment.runs[run_id])
        if watch.number:
            watch.number = max(watch.number, newest)
        taken = self._queue.marks.read(run_id, watch.number) if watch.number <= newest else None
        watch.job = (taken.job if taken else "") or self._queue.id_of(run_id, watch.number)
        job = self._jobs.get(watch.job)
        self._retire_forgotten(taken)
        news = watch.look(run_id, files, job, taken)
        if run_id in self._to_cancel and (job.waits if job else not watch.has_place):
            news = [Ended(run_id, None, taken_back=True)]
        return news

    def _wait_again(self) -> None:
        """Ask anew for runs that Ray had no room for within its time limit: waiting is no failure."""
        late = [
            run_id
            for run_id, watch in self._watched.items()
            if (job := self._jobs.get(watch.job)) is not None and job.error == NO_ROOM
        ]
        for run_id in late:
            self._watched[run_id] = Watch(self._watched[run_id].number + 1)
        if late:
            self._write_wanted()
            self._assignment.say(
                f"Ray found no room for {len(late)} runs in the time that it allows "
                "(RAY_JOB_START_TIMEOUT_SECONDS); they are submitted again"
            )

    def _drop(self, run_id: str) -> None:
        del self._watched[run_id]
        self._to_cancel.pop(run_id, None)

    # Ending

    def _stop_wanted(self) -> None:
        for run_id, now in self._to_cancel.items():
            watch = self._watched[run_id]
            if watch.number and self._is_live(run_id, watch.number):
                if watch.job not in self._stopped:
                    self._client.stop(watch.job)
                    self._stopped.add(watch.job)
            elif not watch.number:
                self._signal(run_id, now=now)

    def _signal(self, run_id: str, *, now: bool) -> None:
        problem = signal_worker(RunFiles(self._assignment.runs[run_id]), now=now, engine="Ray")
        if problem:
            self._say_once(f"{run_id}: {problem}")

    def _taken_back(self) -> list[Begun | Ended]:
        """Let go, while Ray does not answer, of cancelled runs that nobody works on: none will start."""
        happened: list[Begun | Ended] = []
        for run_id in list(self._to_cancel):
            files = RunFiles(self._assignment.runs[run_id])
            if not is_alive(files):
                happened.append(Ended(run_id, None, taken_back=True))
                self._drop(run_id)
        return happened
