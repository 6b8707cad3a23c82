"""Submits a campaign's driver and reads its events; asks Ray only whether the driver lives."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from retrain.base.errors import EXIT_DONE, LaunchError, RecordsError
from retrain.campaign.launchers import Assignment, Ended
from retrain.campaign.launchers.cluster import (
    FORGOTTEN,
    ClusterLauncher,
    News,
    SubmittedRun,
    is_alive,
    output_hint,
)
from retrain.campaign.launchers.ray import (
    DRIVER,
    job_options,
    large_enough,
    node_of,
    pin,
    render,
    task_options,
)
from retrain.campaign.launchers.ray.client import (
    BY_COMMAND,
    LOCAL,
    NO_ROOM,
    JobsClient,
    LocalJobs,
    RayJob,
    said_of,
)
from retrain.campaign.launchers.ray.home import GIVEN, LOST, Home
from retrain.campaign.launchers.shared_permits import MODULE, SHARED, LockTest
from retrain.config.schema import RaySection
from retrain.records.files import write_atomic
from retrain.records.text import count_of


class RayLauncher(ClusterLauncher):
    """Submits, watches and stops a campaign's runs."""

    def __init__(self, assignment: Assignment, table: RaySection, client: JobsClient | None = None) -> None:
        """Open without a request; `client` is of the cluster, by default the one in the table."""
        super().__init__("Ray", assignment, table)
        self._table = table
        self._home = Home(assignment.directory)
        is_local = client is None and table.address == LOCAL
        self._client = (
            LocalJobs(self._home, assignment.say) if is_local else client or JobsClient(table.address)
        )
        self._driver: RayJob | None = None  # at the last poll
        self._missing = 0  # polls at which Ray did not know the driver
        self._node = ""  # the only node on which runs may be placed

    def submit(self, run_ids: Sequence[str]) -> Collection[str]:
        """Record runs as wanted, and submit a driver if none lives."""
        if not self._prepare():
            return ()
        self._home.read_events()
        number = 1 + max([self._home.orders().serial, *(event.number for event in self._home.last.values())])
        for run_id in run_ids:
            self._watch(run_id, number)
        try:
            if not self.asking.is_fresh:
                self._ask()
            self._keep_driver(serial=number)
        except (LaunchError, RecordsError):
            for run_id in run_ids:
                del self._watched[run_id]
            with suppress(RecordsError):  # the driver may then run them; the next submission finds that out
                self._write()
            raise
        self.asking.postpone()
        return run_ids

    def queued(self) -> Collection[str]:
        """Ask Ray for the driver; it has the wanted runs that are neither over nor lost."""
        self._ask()
        self._home.read_events()
        return self._open().keys()

    def adopt(self, run_ids: Sequence[str]) -> None:
        """Watch runs that the driver has, and runs that are alive without one."""
        numbers = self._open()
        for run_id in run_ids:
            self._watch(run_id, numbers.get(run_id, 0))
        if numbers:
            with suppress(RecordsError):  # the next submission tells it as well
                self._write(workers=self._workers)  # `max_workers` may have been another

    def cancel(self, run_ids: Sequence[str], *, now: bool) -> None:
        """Ask workers to save and exit, or to end at once; runs that have not begun never start."""
        for watch in (self._watched[run_id] for run_id in run_ids if run_id in self._watched):
            watch.wish = 2 if now else 1
            if not watch.number:
                self._signal(watch, now=now)
        self._write()
        self.asking.hurry()

    def _open(self) -> dict[str, int]:
        """Return the runs that a live driver runs, or will run, with their numbers."""
        if self._driver is None or self._driver.is_over:
            return {}
        runs = self._home.orders().runs.items()
        last = {run_id: self._home.event(run_id, number) for run_id, number in runs}
        over = {run_id for run_id, event in last.items() if event is not None and event.what != GIVEN}
        return {run_id: number for run_id, number in runs if run_id not in over}

    # The driver

    def _prepare(self) -> bool:
        """Write what jobs need; False if a stop comes before permits are known to be safe."""
        self._home.prepare()
        write_atomic(self._home.script, render(self._assignment, self._table))
        test = RayLockTest(self._assignment, self._table, self._home, self._client)
        node = test.node(self.asking.rest)
        if node is None:
            return False
        if node:
            self._say_once(f"only node {node} is large enough for a run, so all runs keep to it")
        self._node = node
        if self._assignment.gpu_runs and not self._table.gpus:
            seeing = count_of(len(self._assignment.gpu_runs), "run")
            self._say_once(f"{seeing} would train on visible GPUs, but Ray shows none: gpus = 0")
        return True

    def _write(self, **changes: Any) -> None:
        """Write the orders: the watched runs in launch order, those to end, and other changes."""
        if not self._home.directory.is_dir():  # nothing was ever submitted
            return
        in_order = (self._watched[run_id] for run_id in self._assignment.runs if run_id in self._watched)
        submitted = [watch for watch in in_order if watch.number]
        runs = {watch.run_id: watch.number for watch in submitted}
        stop = {watch.run_id: watch.wish for watch in submitted if watch.wish}
        self._home.write(replace(self._home.orders(), runs=runs, stop=stop, **changes))

    def _ask(self) -> None:
        try:
            number = self._home.orders().driver
            job = self._client.job(self._id_of(number)) if number else None
        finally:
            self.asking.asked()
        self._driver = None
        with suppress(OSError):  # a job may belong to a copy of this campaign
            if job and Path(job.metadata["retrain_campaign"]).samefile(self._assignment.directory):
                self._driver = job
        self._missing = 0 if self._driver else self._missing + 1

    def _id_of(self, number: int) -> str:
        return f"{self._assignment.campaign}.{number}"

    def _keep_driver(self, **changes: Any) -> None:
        """Put a driver in charge; a live driver gets the new orders."""
        changes |= {"workers": self._workers, "options": task_options(self._table, self._node)}
        number, is_taken = self._home.orders().driver, self._driver is not None and not self._driver.is_over
        if is_taken:
            self._write(**changes)
        while not is_taken:
            number += 1
            self._write(driver=number, **changes)
            entry = ["bash", self._home.script, DRIVER, self._assignment.directory, number]
            command, asked = shlex.join(map(str, entry)), job_options(self._assignment, self._table)
            is_taken = self._client.submit(self._id_of(number), command, asked)
            self._driver, self._missing = RayJob(self._id_of(number), "PENDING"), 0

    # Polling

    def _poll(self) -> News:
        happened: News = []
        try:
            self._ask()
            self._home.read_events()
            happened += self._each(lambda watch: self._see(watch, has_driver=not self._is_driver_over()))
            if self._is_driver_over() and any(watch.number for watch in self._watched.values()):
                happened += self._see_to_driver()
        except (LaunchError, RecordsError) as error:
            self.asking.unanswered(error)
            happened += self._each(lambda watch: self._see(watch, has_driver=False))
        else:
            self.asking.answered()
        if any(isinstance(event, Ended) for event in happened):
            with suppress(RecordsError):  # a driver may then redo a lost run; the retry finds that out
                self._write()
        return happened

    def _is_driver_over(self) -> bool:
        return self._missing >= FORGOTTEN if self._driver is None else self._driver.is_over

    def _see(self, watch: SubmittedRun, *, has_driver: bool) -> News:
        if not watch.number:
            return watch.without_task("Ray has no record of its worker")
        if is_alive(watch.files):
            return watch.begin()
        event = self._home.event(watch.run_id, watch.number)
        if event is None or event.what == GIVEN:
            is_taken_back = watch.wish and (event is None or not has_driver)
            return [Ended(watch.run_id, None, taken_back=True)] if is_taken_back else []
        if event.exit_code is None and not event.why:
            return [Ended(event.run_id, None, taken_back=True)]
        begun = watch.begin() if event.exit_code is not None else []
        if event.exit_code == EXIT_DONE and not watch.has_arrived():
            return begun
        is_lost = event.what == LOST
        why = f"Ray says: {event.why}{output_hint(watch.files)}" if event.why else ""
        return [*begun, Ended(event.run_id, event.exit_code, why, cut_short=is_lost, is_lost=is_lost)]

    def _see_to_driver(self) -> News:
        """Replace a driver that has ended while runs are wanted, unless a new one would fail as well."""
        driver = self._driver
        is_stopped = driver is not None and driver.status == "STOPPED"
        has_waited = driver is not None and (driver.status == "SUCCEEDED" or driver.error == NO_ROOM)
        if has_waited or (self._home.has_worked(self._home.orders().driver) and not is_stopped):
            if any(watch.number and not watch.wish for watch in self._watched.values()):
                self._keep_driver()
                self.asking.postpone()
            return []
        return self._each(lambda watch: _without_driver(watch, driver))


def _without_driver(watch: SubmittedRun, driver: RayJob | None) -> News:
    """Return the end of a run whose driver ended, with Ray's reason."""
    if not watch.number or is_alive(watch.files):
        return []
    if driver is None:
        return [watch.lost(f"Ray no longer knows the campaign's driver{output_hint(watch.files)}")]
    if driver.status == "STOPPED":
        return [Ended(watch.run_id, None, said_of(driver), taken_back=True)]
    if driver.status == "FAILED":
        with suppress(RecordsError):  # a missing directory or a full disk: reported at the run's end
            write_atomic(watch.files.directory / f"engine-{driver.id}.out", driver.message + "\n")
    why, is_lost = said_of(driver) + output_hint(watch.files), driver.error != BY_COMMAND
    return [Ended(watch.run_id, None, why, cut_short=is_lost, is_lost=is_lost)]


class RayLockTest(LockTest):
    """Two jobs, each pinned to a node of its own."""

    def __init__(self, assignment: Assignment, table: RaySection, home: Home, client: JobsClient) -> None:
        super().__init__(assignment, home.directory / "locks.json")
        self._table = table
        self._home = home
        self._client = client
        self._nodes: list[str] = []  # addresses of the nodes that are large enough for a run
        self._jobs: list[str] = []

    def node(self, rest: Callable[[float], bool]) -> str | None:
        """Ensure that no shared permit is given out twice: by a test, or by keeping to one node.

        Returns the only node on which runs may be placed; "" for all nodes; None if a stop comes first.
        Raises LaunchError if locks are not shared, or the test cannot run.
        """
        table = self._table
        if table.permits != SHARED or self._assignment.permits is None or table.address == LOCAL:
            return ""
        if self._verdict() != "":
            nodes = large_enough(task_options(table), self._client.resources())
            self._nodes = sorted(filter(None, map(node_of, nodes)))
            if len(self._nodes) == 1 and not table.autoscales:
                return self._nodes[0]
            if len(self._nodes) < 2:
                raise LaunchError(
                    f'[campaign.ray].permits = "shared": {len(self._nodes)} nodes are large enough for a run '
                    "at present, but it takes two to test whether nodes see each other's file locks; start "
                    'two, or use permits = "split"'
                )
        return "" if self.is_passed(rest) else None

    def start(self) -> None:
        mark, options = secrets.token_hex(4), job_options(self._assignment, self._table)
        test = ["bash", self._home.script, MODULE, self._path, *self._directories]
        for rank, node in enumerate((self._nodes[0], self._nodes[-1])):
            job = f"{self._home.campaign.name}.locks.{mark}-{rank}"  # unlike a driver's, it ends in no number
            command = shlex.join(map(str, [*test, rank, mark, node]))
            self._jobs.append(job)
            self._client.submit(job, command, {**options, "entrypoint_resources": pin(node)})

    def failure(self) -> str:
        jobs = [job for job in self._client.jobs() if job.id in self._jobs]
        for job in jobs:
            if job.status in ("FAILED", "STOPPED"):
                return f"{said_of(job)}. Do all nodes see {self._home.directory}?"
        nodes = [job.node for job in jobs if job.node]
        return "Ray ran both parts on one node." if len(nodes) > len(set(nodes)) else ""

    def end(self) -> None:
        for job in self._jobs:
            self._client.stop(job)
