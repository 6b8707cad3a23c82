"""Submits a campaign's driver and reads its events; asks Ray only whether the driver lives."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from retrain.config.engines import Ray
from retrain.errors import EXIT_DONE, LaunchError, RecordsError
from retrain.launchers import Assignment, Begun, Ended
from retrain.launchers.asking import Asking
from retrain.launchers.engine_watch import FORGOTTEN, EngineWatch, is_alive, is_finished, why_without_a_word
from retrain.launchers.permit_split import workers_at_a_time
from retrain.launchers.ray.client import BY_COMMAND, NO_ROOM, Client, Job, said_of
from retrain.launchers.ray.home import GIVEN, LOST, OVER, Event, Home, Ledger, Terms
from retrain.launchers.ray.local import LOCAL, LocalJobs
from retrain.launchers.ray.locks import LockTest
from retrain.launchers.ray.script import DRIVER, job_options, render, task_options
from retrain.launchers.signals import signal_worker
from retrain.records.atomic import write_atomic
from retrain.records.layout import RunFiles


class Watch(EngineWatch):
    """A run that the driver has, or that is alive without a driver (number 0)."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.is_cancelled = False


class RayLauncher:
    """Submits, watches and stops a campaign's runs."""

    queues = True

    def __init__(self, assignment: Assignment, table: Ray, client: Client | None = None) -> None:
        """Open; sends no request yet.

        Args:
            assignment: the campaign.
            table: [campaign.ray].
            client: of the cluster; default: the cluster in the table.
        """
        self._assignment = assignment
        self._table = table
        self._workers = workers_at_a_time(assignment, table.permits)
        self._home = Home(assignment.directory)
        is_local = table.address == LOCAL
        alone = LocalJobs(self._home, assignment.say) if is_local else Client(table.address)
        self._client = client or alone
        self._ledger = Ledger(self._home)
        self._order = {run_id: number for number, run_id in enumerate(assignment.runs)}
        self._watched: dict[str, Watch] = {}
        self._driver: Job | None = None  # at the last poll
        self._missing = 0  # polls at which Ray did not know the driver
        self._node = ""
        self._asking = Asking("Ray", table.poll_seconds, assignment.say)
        self._said: set[str] = set()

    def describe(self) -> str:
        """Return where workers execute."""
        return f"Ray, {self._workers} at a time"

    def room(self) -> int:
        """Return how many more runs the cap allows; queued runs count."""
        return max(0, self._workers - len(self._watched))

    def submit(self, run_ids: Sequence[str]) -> Collection[str]:
        """Record runs as wanted, and submit a driver if none lives."""
        if not self._prepare():
            return ()
        self._ledger.read()
        wanted = self._home.wanted()
        for run_id in run_ids:
            number = max(self._ledger.number(run_id), wanted.get(run_id, 0)) + 1
            while self._home.is_stopped(run_id, number):  # cancelled before the driver saw it
                number += 1
            self._watched[run_id] = Watch(number)
        try:
            self._write_wanted()
            if not self._asking.is_fresh:
                self._ask()
            self._keep_driver()
        except (LaunchError, RecordsError):
            for run_id in run_ids:
                del self._watched[run_id]
            with suppress(RecordsError):  # the driver may then run them; the next submission finds that out
                self._write_wanted()
            raise
        self._asking.postpone()
        return run_ids

    def queued(self) -> Collection[str]:
        """Ask Ray for the driver; it has the wanted runs that are neither over nor lost."""
        self._ask()
        self._ledger.read()
        if self._driver is None or self._driver.is_over:
            return ()
        numbers = self._home.wanted()
        told = {run_id: self._ledger.last.get(run_id) for run_id in numbers}
        return {run_id for run_id, number in numbers.items() if _is_open(told[run_id], number)}

    def adopt(self, run_ids: Sequence[str]) -> None:
        """Watch runs that the driver has, and runs that are alive without one."""
        wanted = self._home.wanted() if self._driver is not None and not self._driver.is_over else {}
        for run_id in run_ids:
            number = wanted.get(run_id, 0)
            self._watched[run_id] = Watch(number if _is_open(self._ledger.last.get(run_id), number) else 0)

    def poll(self, timeout_s: float) -> Sequence[Begun | Ended]:
        """Wait until the next poll is due, and return what changed."""
        return self._look() if self._asking.wait(timeout_s) else []

    def wake(self) -> None:
        """Make `poll` return."""
        self._asking.wake()

    def cancel(self, run_ids: Sequence[str], *, now: bool) -> None:
        """Ask workers to save and exit, or to end at once; runs that have not begun never start."""
        for run_id in run_ids:
            watch = self._watched.get(run_id)
            if watch is None:
                continue
            watch.is_cancelled = True
            if watch.number:
                self._home.stop(run_id, watch.number, now=now)
            elif problem := signal_worker(self._files(run_id), now=now, engine="Ray"):
                self._say_once(f"{run_id}: {problem}")
        self._write_wanted()
        self._asking.hurry()

    # The driver

    def _prepare(self) -> bool:
        """Write what jobs need; False if a stop comes before permits are known to be safe."""
        self._home.prepare()
        write_atomic(self._home.script, render(self._assignment, self._table))
        test = LockTest(self._assignment, self._table, self._home, self._client)
        node = test.node(self._asking.rest)
        if node is None:
            return False
        if node:
            self._say_once(f"only node {node} is large enough for a run, so all runs keep to it")
        self._node = node
        if self._assignment.gpu_runs and not self._table.gpus:
            seeing = len(self._assignment.gpu_runs)
            self._say_once(f"{seeing} runs train on visible GPUs, but Ray shows them none: gpus = 0")
        return True

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._assignment.say(text)
            self._said.add(text)

    def _write_wanted(self) -> None:
        wanted = {r: watch.number for r, watch in self._watched.items() if watch.number}
        in_order = sorted(wanted, key=self._order.__getitem__)
        self._home.want({r: wanted[r] for r in in_order if not self._watched[r].is_cancelled})

    def _ask(self) -> None:
        try:
            number = self._home.terms().driver
            found = self._client.job(self._id_of(number)) if number else None
        finally:
            self._asking.asked()
        self._driver = found if found is not None and self._is_ours(found) else None
        self._missing = 0 if self._driver else self._missing + 1

    def _id_of(self, number: int) -> str:
        return f"{self._assignment.campaign}.{number}"

    def _is_ours(self, job: Job) -> bool:
        """Whether a job belongs to this campaign, and not to a copy of it."""
        with suppress(OSError):
            return Path(job.metadata["retrain_campaign"]).samefile(self._assignment.directory)
        return False

    def _keep_driver(self) -> None:
        """Put a driver in charge; a live driver gets the new terms."""
        number, options = self._home.terms().driver, task_options(self._table, self._node)
        if self._driver is not None and not self._driver.is_over:
            self._home.write_terms(Terms(number, self._workers, options))
            return
        is_taken = False
        while not is_taken:
            number += 1
            self._home.write_terms(Terms(number, self._workers, options))
            entry = ["bash", self._home.script, DRIVER, self._assignment.directory, number]
            command, asked = shlex.join(map(str, entry)), job_options(self._assignment, self._table)
            is_taken = self._client.submit(self._id_of(number), command, asked)
        self._driver, self._missing = Job(self._id_of(number), "PENDING"), 0

    # Polling

    def _look(self) -> list[Begun | Ended]:
        happened: list[Begun | Ended] = []
        try:
            self._ask()
            self._ledger.read()
            happened += self._see_all(is_known=True)
            if self._is_driver_over() and any(watch.number for watch in self._watched.values()):
                happened += self._see_to_driver()
        except (LaunchError, RecordsError) as error:
            self._asking.unanswered(error)
            happened += self._see_all(is_known=False)
        else:
            self._asking.answered()
        if any(isinstance(event, Ended) for event in happened):
            with suppress(RecordsError):  # a driver may then redo a lost run; the retry finds that out
                self._write_wanted()
        return happened

    def _is_driver_over(self) -> bool:
        return self._missing >= FORGOTTEN if self._driver is None else self._driver.is_over

    def _see_all(self, *, is_known: bool) -> list[Begun | Ended]:
        seen = ((run_id, self._see(run_id, w, is_known)) for run_id, w in list(self._watched.items()))
        return [event for run_id, news in seen for event in self._noted(run_id, news)]

    def _noted(self, run_id: str, news: list[Begun | Ended]) -> list[Begun | Ended]:
        if news and isinstance(news[-1], Ended):
            del self._watched[run_id]
        return news

    def _see(self, run_id: str, watch: Watch, is_known: bool) -> list[Begun | Ended]:
        files = self._files(run_id)
        if is_finished(files):
            return [*watch.begin(run_id), Ended(run_id, EXIT_DONE)]
        if not watch.number:
            return self._see_without_driver(run_id, watch, files)
        event = self._ledger.of(run_id, watch.number) or Event(run_id, watch.number, 1, GIVEN, 0)
        if event.what != GIVEN and not is_alive(files):
            return self._see_end(watch, event, files)
        if self._home.has_begun(event.name):
            news = watch.begin(run_id)
            has_driver = is_known and not self._is_driver_over()
            is_gone = watch.is_cancelled and not has_driver and not is_alive(files)
            return [Ended(run_id, None, taken_back=True)] if is_gone else news
        return [Ended(run_id, None, taken_back=True)] if watch.is_cancelled else []

    def _see_without_driver(self, run_id: str, watch: Watch, files: RunFiles) -> list[Begun | Ended]:
        if is_alive(files):
            watch.found()
            return watch.begin(run_id)
        return watch.missed(run_id, "Ray has no record of its worker")

    def _see_end(self, watch: Watch, event: Event, files: RunFiles) -> list[Begun | Ended]:
        if event.exit_code is None and not event.why:
            return [Ended(event.run_id, None, taken_back=True)]
        begun = watch.begin(event.run_id) if self._home.has_begun(event.name) else []
        if event.exit_code == EXIT_DONE and not watch.has_arrived(files):
            return begun
        is_lost = event.what == LOST
        why = f"Ray says: {event.why}{why_without_a_word(files)}" if event.why else ""
        return [*begun, Ended(event.run_id, event.exit_code, why, goes_on=is_lost, is_lost=is_lost)]

    def _see_to_driver(self) -> list[Begun | Ended]:
        """Replace a driver that has ended while runs are wanted, unless a new one would fail as well."""
        driver = self._driver
        is_stopped = driver is not None and driver.status == "STOPPED"
        has_waited = driver is not None and (driver.status == "SUCCEEDED" or driver.error == NO_ROOM)
        if has_waited or (self._ledger.driver == self._home.terms().driver and not is_stopped):
            if any(watch.number and not watch.is_cancelled for watch in self._watched.values()):
                self._keep_driver()
                self._asking.postpone()
            return []
        happened: list[Begun | Ended] = []
        for run_id, watch in list(self._watched.items()):
            files = self._files(run_id)
            if watch.number and not is_alive(files):
                self._keep_words(files, driver)
                happened += self._noted(run_id, [_without_driver(run_id, files, driver)])
        return happened

    def _keep_words(self, files: RunFiles, driver: Job | None) -> None:
        if driver is not None and driver.status == "FAILED":
            with suppress(RecordsError):  # a missing directory or a full disk: reported at the run's end
                write_atomic(files.directory / f"engine-{driver.id}.out", driver.message + "\n")

    def _files(self, run_id: str) -> RunFiles:
        return RunFiles(self._assignment.runs[run_id])


def _is_open(last: Event | None, number: int) -> bool:
    """Whether a live driver runs, or will run, a run under a number."""
    return number > 0 and (last is None or last.number < number or last.what not in (LOST, OVER))


def _without_driver(run_id: str, files: RunFiles, driver: Job | None) -> Ended:
    """Return the end of a run whose driver ended, with Ray's reason."""
    if driver is not None and driver.status == "STOPPED":
        return Ended(run_id, None, said_of(driver), taken_back=True)
    is_lost = driver is None or driver.error != BY_COMMAND
    said = said_of(driver) if driver else "Ray no longer knows the campaign's driver"
    return Ended(run_id, None, said + why_without_a_word(files), goes_on=is_lost, is_lost=is_lost)
