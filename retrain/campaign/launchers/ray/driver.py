"""The job of a campaign on the cluster: submits its runs to Ray as tasks, up to the cap at a time."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from retrain.base.errors import (
    EXIT_DONE,
    EXIT_INFRASTRUCTURE,
    ClusterDownError,
    LaunchError,
    RecordsError,
    may_pass,
)
from retrain.base.locks import hold, is_held
from retrain.campaign.launchers.cluster import is_alive
from retrain.campaign.launchers.ray import GRACE, what_lacks
from retrain.campaign.launchers.ray.client import JOB_CONFIG, LOCAL
from retrain.campaign.launchers.ray.home import GIVEN, LOST, OVER, Home, Orders, TaskEvent
from retrain.records.campaign_state import asked_to_stop
from retrain.records.files import readable, write_atomic
from retrain.records.layout import CampaignFiles, files_of_runs
from retrain.records.text import plain

T = TypeVar("T")

POLL_S = 1.0
MOST_LIVES = 4  # of one run without an orchestrator: the run itself may be killing its nodes
HOST = "127.0.0.1" if sys.platform == "darwin" else "127.0.0.2"  # of its own Ray; on Linux it replaces .1
MEMORY = 80_000_000  # bytes of its object store, which no run uses
PATIENCE_S = 60.0  # for an earlier driver to exit


class Cluster:
    """The Ray cluster that this job was submitted to, or the driver's own."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import ray

        from retrain.campaign.launchers.ray import task

        ray.init(log_to_driver=False, configure_logging=False, **options)
        ray.cloudpickle.register_pickle_by_value(task)
        self._ray = ray
        self._work = ray.remote(task.work)

    def start(self, name: str, arguments: Sequence[str], options: Mapping[str, Any]) -> Any:
        """Call `task.work` on a node as soon as one has room; return the task's handle."""
        # no retries by Ray: what happens to a lost run depends on whether an orchestrator lives
        return self._work.options(name=name, max_retries=0, **options).remote(*arguments)

    def wait(self, handles: Sequence[Any], seconds: float) -> Collection[Any]:
        """Wait until a task has ended, or for the timeout; return the ended tasks."""
        if not handles:
            time.sleep(seconds)
            return ()
        ready: list[Any] = self._ray.wait(handles, num_returns=1, timeout=seconds)[0]
        return ready

    def ended(self, handle: Any, event: TaskEvent) -> TaskEvent:
        from ray.exceptions import RayError, RayTaskError, RuntimeEnvSetupError, TaskCancelledError

        try:
            return replace(event, what=OVER, exit_code=self._ray.get(handle))
        except TaskCancelledError:
            return replace(event, what=OVER)
        except (RayTaskError, RuntimeEnvSetupError) as error:
            return replace(event, what=OVER, why=last_line(error))
        except RayError as error:
            return replace(event, what=LOST, why=f"{type(error).__name__}: {error}")

    def cancel(self, handle: Any) -> None:
        """Cancel a task that has not begun, or whose worker does not hold its run."""
        self._ray.cancel(handle)

    def require_room(self, options: Mapping[str, Any]) -> None:
        """Raise LaunchError if a task is too large for this machine, the only node."""
        if lacking := what_lacks(options, [self._ray.cluster_resources()]):
            raise LaunchError(f"this machine does not have {lacking}, so no run would ever start")

    def close(self) -> None:
        self._ray.shutdown()


def last_line(error: Exception) -> str:
    """Return the last line of an error's message, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


class Driver:
    """Runs a campaign's runs to their end."""

    def __init__(self, home: Home, number: int, cluster: Cluster) -> None:
        self._home = home
        self._number = number
        self._cluster = cluster
        self._files = CampaignFiles(home.campaign)
        self._tasks: dict[Any, TaskEvent] = {}
        self._elsewhere: set[str] = set()  # runs whose worker belongs to no task
        self._wish = 0  # 1: save and exit, 2: end at once

    def leave(self) -> None:
        """Ask all workers to save and exit; for signal handlers."""
        self._wish = max(self._wish, 1)

    def drive(self) -> None:
        """Work until all runs are over, or another driver is in charge and the tasks have ended."""
        _patiently(self._take_over)
        while _patiently(self._poll):
            pass

    def _take_over(self) -> None:
        """Stop what earlier drivers left; may be repeated after an error."""
        self._home.read_events()
        self._elsewhere = {run_id for run_id, files in files_of_runs(self._files).items() if is_alive(files)}
        for event in list(self._home.last.values()):
            if event.what == GIVEN:
                self._home.stop(event, now=False)  # its worker may outlive the driver that submitted it
                self._write(replace(event, what=LOST, why="with the driver that submitted it to Ray"))

    def _poll(self) -> bool:
        """Follow the orders; return whether there is, or may be, more to do."""
        orders, wish = self._home.orders(), max(self._wish, asked_to_stop(self._files))
        is_in_charge = orders.driver == self._number
        is_watched = bool(readable(is_held, self._files.lock))  # an orchestrator's retry policy then applies
        todo = {}  # the runs that are neither over nor to be stopped, with their numbers
        for run_id, number in orders.runs.items() if is_in_charge and not wish else ():
            last = self._home.event(run_id, number)
            is_open = last is None or last.what == GIVEN or (last.what == LOST and last.life < MOST_LIVES)
            if is_open and run_id not in orders.stop:
                todo[run_id] = number
        self._elsewhere = {run_id for run_id in self._elsewhere if is_alive(self._home.run(run_id))}
        self._stop(orders, todo, wish)
        busy = {event.run_id for event in self._tasks.values()} | self._elsewhere
        for run_id, number in todo.items():
            last = self._home.event(run_id, number)
            if len(busy) >= orders.workers:
                break
            if run_id in busy or (last is not None and last.what == LOST and is_watched):
                continue  # whether a lost one begins anew is the orchestrator's to decide
            event = TaskEvent(run_id, number, last.life + 1 if last else 1)
            self._write(event)
            handle = self._cluster.start(event.name, self._home.task_arguments(event), orders.options)
            self._tasks[handle] = event
            busy.add(run_id)
        # an orchestrator may resubmit some of these runs: retries wait for their backoff
        may_be_needed = is_in_charge and is_watched and not self._wish
        if not self._tasks and not todo and not may_be_needed:
            return False
        for handle in self._cluster.wait(list(self._tasks), POLL_S):
            self._conclude(self._cluster.ended(handle, self._tasks.pop(handle)), is_in_charge)
        return True

    def _stop(self, orders: Orders, todo: Mapping[str, int], wish: int) -> None:
        """Stop the tasks of runs that are to be stopped, and take back others that are not wanted."""
        for handle, event in self._tasks.items():
            if todo.get(event.run_id) == event.number:
                continue
            is_its = orders.runs.get(event.run_id) == event.number
            level = max(wish, orders.stop.get(event.run_id, 0) if is_its else 0)
            if level:
                self._home.stop(event, now=level > 1)
            files = self._home.run(event.run_id)
            if not is_alive(files) and (level or not files.done.exists()):  # if done, its worker still exits
                self._cluster.cancel(handle)

    def _conclude(self, ended: TaskEvent, is_in_charge: bool) -> None:
        files = self._home.run(ended.run_id)
        if ended.exit_code == EXIT_INFRASTRUCTURE and is_alive(files):
            self._elsewhere.add(ended.run_id)  # by a worker that outlives its node's connection
            ended = replace(ended, what=LOST, exit_code=None, why="another worker holds the run")
        if is_in_charge:
            if ended.why:
                words = files.directory / f"engine-ray.{ended.number}.{ended.life}.out"
                write_atomic(words, f"{ended.why}\n")
            self._write(ended)

    def _write(self, event: TaskEvent) -> None:
        self._home.write_event(replace(event, driver=self._number, why=plain(event.why, 400)))


def _patiently(work: Callable[[], T]) -> T:
    """Repeat some work while the disk is full or the file server is unreachable; return its result."""
    while True:
        try:
            return work()
        except RecordsError as error:
            if not may_pass(error):
                raise
            time.sleep(POLL_S)


@contextmanager
def own_ray(home: Home) -> Iterator[dict[str, Any]]:
    """Return arguments of `ray.init`, for a Ray of its own; none if a cluster started this driver."""
    if os.environ.get("RAY_ADDRESS") != LOCAL:
        yield {}
        return
    until = time.monotonic() + PATIENCE_S
    while (lock := hold(home.lock)) is None:
        if time.monotonic() > until:
            raise ClusterDownError(f"{home.lock}: an earlier driver does not exit")
        time.sleep(0.2)
    # a short name: a socket's path has its limits
    with lock, tempfile.TemporaryDirectory(prefix="retrain-ray-", ignore_cleanup_errors=True) as temporary:
        yield {
            "include_dashboard": False,
            "object_store_memory": MEMORY,
            "_node_ip_address": HOST,
            "_temp_dir": temporary,
        }


def config_of_tasks(config: str) -> str:
    """Return a job's configuration, as JSON, with the runtime environment that its tasks are to have.

    Without what only the job needs there often is none left, and then Ray starts a task's process in one
    step instead of two, each of which imports Ray, or has one ready.
    """
    settings = json.loads(config)
    environment = settings.get("runtime_env") or {}
    kept = {name: text for name, text in environment.pop("env_vars", {}).items() if name not in GRACE}
    return json.dumps({**settings, "runtime_env": {**environment, **({"env_vars": kept} if kept else {})}})


def main(campaign: Path, number: int) -> int:
    """Run as the driver; return an exit code."""
    os.environ[JOB_CONFIG] = config_of_tasks(os.environ[JOB_CONFIG])
    home = Home(campaign)
    with own_ray(home) as options, closing(Cluster(options)) as cluster:
        if options:
            cluster.require_room(_patiently(home.orders).options)
        driver = Driver(home, number, cluster)
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: driver.leave())
        driver.drive()
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
