"""A campaign on a Ray cluster: one job, the driver, keeps up to `max_workers` tasks submitted.

    this file     in the orchestrator: submits the driver, writes its orders, reads its events
    driver.py     on the head, with CAMPAIGN NUMBER as arguments: runs are Ray's tasks
    task.py       on a node: a worker process, which ends with its task
    home.py       the files below      client.py   Ray's Jobs API

They communicate through the directory `ray/` of the campaign, wherever they run:

    orders.json    by the orchestrator: the driver in charge, the cap, and what to do and to stop
    events.jsonl   by the driver: what happened to the runs
    stopped/       by the driver: RUN.NUMBER.LIFE.save or .now: a task ends its worker, or does not start it
    job.sh         starts the driver and the workers

- The campaign continues without the orchestrator. The driver reads its orders and the campaign's request to
  stop every second, and exits once no run is left and no orchestrator lives that could submit more.
- Each submission has a number, higher than those before; the driver counts a run's lives under its number. A
  task that Ray lost (with its node, or out of memory) is resubmitted by the orchestrator's retry policy while
  one lives, otherwise by the driver, up to four lives.
- No run runs twice: whether a worker lives is read from its run's lock. Workers that belong to no task of the
  driver count against the cap until they exit; those of an earlier driver are asked to save and exit.
- No run is orphaned: Ray ends the tasks of a driver that is gone, and a worker dies with its task. A stopped
  run that has not begun is cancelled, or its task sees `stopped/`, or its worker the request to stop.
- A driver that is lost is replaced by the orchestrator; without one, by `retrain resume`. One that is not in
  charge starts nothing more and waits for its tasks.
- With `address = "local"` the driver is a process of this machine, with a Ray of its own that ends with it.
"""

from __future__ import annotations

import json
import secrets
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from retrain.base.errors import EXIT_DONE, LaunchError, RecordsError
from retrain.base.extras import load, missing_problem
from retrain.campaign.launchers import Assignment, Ended
from retrain.campaign.launchers.cluster import (
    FORGOTTEN,
    ClusterLauncher,
    News,
    SubmittedRun,
    is_alive,
    output_hint,
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
from retrain.campaign.launchers.shared_permits import (
    MODULE,
    SHARED,
    LockTest,
    own_permits,
    table_problems,
    workers_at_a_time,
)
from retrain.config.keys import LARGEST_COUNT
from retrain.config.resolve import build
from retrain.config.schema import RaySection
from retrain.records.files import write_atomic
from retrain.records.text import count_of, plain

OWN_KEYS = {"CPU": "cpus", "GPU": "gpus", "memory": "memory_gb"}
EXTRA = "ray"
PACKAGES = ("ray", "aiohttp")
# Ray ends a stopped job with SIGKILL after 3 s by default, too soon for a checkpoint; this is a day.
GRACE = {"RAY_JOB_STOP_WAIT_TIME_S": "86400"}
NODE = "node:"  # followed by a node's address
DRIVER = "retrain.campaign.launchers.ray.driver"


def open_launcher(assignment: Assignment) -> RayLauncher:
    """Return a launcher; raises LaunchError as `check_cluster` does, before any request."""
    return RayLauncher(assignment, _usable(assignment))


def at_a_time(assignment: Assignment) -> int:
    """Return the cap."""
    return workers_at_a_time(assignment, _table(assignment).permits)


def script(assignment: Assignment) -> str:
    """Return what would be submitted, for `retrain explain`."""
    table = _table(assignment)
    environment = job_options(assignment, table)["runtime_env"]
    environment["env_vars"] = dict.fromkeys(environment["env_vars"], "...")  # may hold secrets
    command = f"bash {assignment.directory}/ray/job.sh"
    lines = [
        "# One job, the driver, on the head of the cluster:",
        f"#   submission_id = {assignment.campaign}.NUMBER",
        f"#   runtime_env = {json.dumps(environment)}",
        f"#   {command} {DRIVER} CAMPAIGN_DIR NUMBER",
        f"# which keeps {workers_at_a_time(assignment, table.permits)} tasks at a time, each asking Ray for",
        *(f"#   {name} = {json.dumps(value)}" for name, value in task_options(table).items()),
        f"# and running `{command} retrain.trainer.worker RUN_DIR`; the script is",
    ]
    return "\n".join(lines) + "\n" + render(assignment, table)


def check_campaign(assignment: Assignment) -> list[str]:
    """List problems that hold on every cluster."""
    table = _table(assignment)
    where = "[campaign.ray]"
    problems = table_problems(assignment, table, "campaign.ray")
    for name, need in table.resources.items():
        if isinstance(need, bool) or not isinstance(need, int | float) or not 0 < need <= LARGEST_COUNT:
            problems.append(f"{where}.resources.{name}: got {need!r}; needs a number above 0")
        if name in OWN_KEYS:
            key = OWN_KEYS[name]
            problems.append(f"{where}.resources.{name}: is not a custom resource; use the key {key}")
    if not any(wanted_by(task_options(table)).values()):
        problems.append(
            f"{where}.cpus: got 0; ask for something, because Ray does not limit tasks that ask for nothing"
        )
    for key in ("working_dir", "py_modules"):
        value = table.runtime_env.get(key, [])
        problems += (
            f"{where}.runtime_env.{key}: {path!r} would be copied; workers run in the directory that the "
            "campaign is started from, so leave it out, or give a URI"
            for path in (value if isinstance(value, list) else [value])
            if "://" not in str(path)
        )
    variables = table.runtime_env.get("env_vars", {})
    if not isinstance(variables, dict) or not all(isinstance(text, str) for text in variables.values()):
        problems.append(f"{where}.runtime_env.env_vars: needs a table of strings")
    return problems


def check_cluster(assignment: Assignment) -> None:
    """Raise LaunchError unless the cluster answers, and has a node that is large enough for a run."""
    table = _usable(assignment)
    if table.address == LOCAL:
        return
    client = JobsClient(table.address)
    client.require_version(as_here=not table.python)
    lacking = what_lacks(task_options(table), client.resources())
    if lacking and not table.autoscales:
        raise LaunchError(
            f"no node of the Ray cluster has {lacking}, so no run would ever start; see [campaign.ray], and "
            "autoscales there if the cluster adds nodes by itself"
        )


def _table(assignment: Assignment) -> RaySection:
    """Return the table of a campaign, with what runs on several devices ask for."""
    table, devices = build(RaySection, assignment.options), assignment.devices
    gpus = max(table.gpus, devices.cores if table.gpus else devices.gpus)
    return replace(table, cpus=max(table.cpus, devices.cores), gpus=gpus)


def _usable(assignment: Assignment) -> RaySection:
    """Return the table of a campaign, if Ray is installed and accepts the runtime environment."""
    if problem := missing_problem("launchers", "ray"):
        raise LaunchError(problem)
    table = _table(assignment)
    try:
        load("ray.runtime_env", "ray", "ray").RuntimeEnv(**table.runtime_env)
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        raise LaunchError(f"[campaign.ray].runtime_env: Ray refuses it: {plain(str(error), 300)}") from error
    return table


class RayLauncher(ClusterLauncher):
    """Submits, watches and stops a campaign's runs."""

    def __init__(self, assignment: Assignment, table: RaySection, client: JobsClient | None = None) -> None:
        """Open without a request; `client` is of the cluster, by default the one in the table."""
        super().__init__("Ray", assignment, table)
        self._table = table
        self._home = Home(assignment.directory)
        if client is None:
            is_local = table.address == LOCAL
            client = LocalJobs(self._home, assignment.say) if is_local else JobsClient(table.address)
        self._client = client
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
                driver = self._driver
                is_stopped = driver is not None and driver.status == "STOPPED"
                has_waited = driver is not None and (driver.status == "SUCCEEDED" or driver.error == NO_ROOM)
                number = self._home.orders().driver
                has_worked = any(event.driver == number for event in self._home.last.values())
                if not has_waited and (is_stopped or not has_worked):  # a new one would fail as well
                    happened += self._each(lambda watch: _without_driver(watch, driver))
                elif any(watch.number and not watch.wish for watch in self._watched.values()):
                    self._keep_driver()
                    self.asking.postpone()
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


def render(assignment: Assignment, table: RaySection) -> str:
    """Return the script that starts driver and workers; its arguments are a module and that module's."""
    lines = [
        "#!/bin/bash",
        f"# Starts what belongs to {assignment.campaign}: a module of retrain, and its arguments.",
        "umask 077",
        f"cd {shlex.quote(str(assignment.where))} || exit 75",
        f"export RETRAIN_JOB={shlex.quote(f'ray {assignment.campaign}')}",
        *own_permits(assignment, table.permits),
        *table.setup,
        f'exec {shlex.quote(table.python or sys.executable)} -P -m retrain.base.hide_process "$@"',
    ]
    return "\n".join(lines) + "\n"


def job_options(assignment: Assignment, table: RaySection) -> dict[str, Any]:
    """Return options of the driver's job, as `submit_job` takes them: no resources, so it is on the head."""
    environment = dict(table.runtime_env)  # tasks have that of their job
    environment["env_vars"] = {**GRACE, **environment.get("env_vars", {})}
    return {"runtime_env": environment, "metadata": {"retrain_campaign": str(assignment.directory)}}


def task_options(table: RaySection, node: str = "") -> dict[str, Any]:
    """Return each task's resources, as `ray.remote` takes them; a given node pins tasks to it."""
    resources = {**table.resources, **(pin(node) if node else {})}
    more = {"num_gpus": table.gpus, "memory": round(table.memory_gb * 1e9), "resources": resources}
    return {"num_cpus": table.cpus, **{name: value for name, value in more.items() if value}}


def wanted_by(options: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources that a task asks for, by Ray's names of a node's resources."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    return {**{name: options.get(key, 0.0) for name, key in named.items()}, **options.get("resources", {})}


def large_enough(
    options: Mapping[str, Any], nodes: Sequence[Mapping[str, float]]
) -> list[Mapping[str, float]]:
    """Return the nodes on which a task can be placed, by their total resources."""
    needs = wanted_by(options).items()
    return [node for node in nodes if all(node.get(name, 0.0) >= need for name, need in needs)]


def what_lacks(options: Mapping[str, Any], nodes: Sequence[Mapping[str, float]]) -> str:
    """Return what no node has of what a task asks for; "" if one is large enough."""
    if large_enough(options, nodes):
        return ""
    needs = wanted_by(options)
    most = {name: max((node.get(name, 0.0) for node in nodes), default=0.0) for name in needs}
    lacking = [
        f"{name} = {need:g} (the most is {most[name]:g})" for name, need in needs.items() if need > most[name]
    ]
    return ", ".join(lacking) or "all that a run asks for at once"


def pin(node: str) -> dict[str, float]:
    """Return the resource that pins work to one node: every node has one named after its address."""
    return {f"{NODE}{node}": 0.001}


def node_of(resources: Mapping[str, float]) -> str:
    """Return a node's address by its resources."""
    named = (name.removeprefix(NODE) for name in resources if name.startswith(NODE))
    return next((address for address in named if not address.startswith("__")), "")
