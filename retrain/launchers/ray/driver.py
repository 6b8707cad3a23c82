"""The job of a campaign on the cluster: submits its runs to Ray as tasks, up to the cap at a time.

`python -m retrain.launchers.ray.driver CAMPAIGN NUMBER` runs on the head until all wanted runs are over and
no live orchestrator could submit more. A task that Ray lost (with its node, or out of memory) is resubmitted
by the orchestrator's retry policy while an orchestrator lives, otherwise by the driver. Workers of an earlier
driver may outlive it by a minute; they count against the cap until they exit. With `address = "local"` the
driver starts a Ray of its own, which ends with it.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrain.errors import EXIT_DONE, EXIT_INFRASTRUCTURE, EngineDownError, RecordsError, may_pass
from retrain.launchers.engine import is_alive
from retrain.launchers.ray.client import LOCAL
from retrain.launchers.ray.home import GIVEN, LOST, OVER, Home, TaskEvent, Terms
from retrain.locks.held import hold, is_held
from retrain.records.campaign_state import asked_to_stop
from retrain.records.files import readable, write_atomic
from retrain.records.layout import CampaignFiles, files_of_runs
from retrain.records.text import plain

LOOK_S = 1.0
MOST_LIVES = 4  # of one run without an orchestrator: the run itself may be killing its nodes
HOST = (
    "127.0.0.1" if sys.platform == "darwin" else "127.0.0.2"
)  # of its own Ray, which on Linux replaces the first
MEMORY = 80_000_000  # bytes of its object store, which no run uses
PATIENCE_S = 60.0  # a driver that is no longer in charge has its workers save and exit


@dataclass(frozen=True, slots=True)
class Result:
    """How a task ended."""

    exit_code: int | None = None
    why: str = ""
    is_lost: bool = False


class Cluster:
    """The Ray cluster that this job was submitted to, or the driver's own."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import ray

        from retrain.launchers.ray import task

        ray.init(log_to_driver=False, configure_logging=False, **options)
        ray.cloudpickle.register_pickle_by_value(task)

        def work(arguments: Sequence[str]) -> int | None:
            return task.work(*arguments, node=ray.get_runtime_context().get_node_id())  # type: ignore[misc]

        self._ray = ray
        self._work = ray.remote(work)

    def start(self, name: str, arguments: Sequence[str], options: Mapping[str, Any]) -> Any:
        """Call `task.work` on a node as soon as one has room; return the task's handle."""
        # no retries by Ray: what happens to a lost run depends on whether an orchestrator lives
        return self._work.options(name=name, max_retries=0, **options).remote(arguments)

    def wait(self, handles: Sequence[Any], seconds: float) -> Collection[Any]:
        """Wait until a task has ended, or for the timeout; return the ended tasks."""
        if not handles:
            time.sleep(seconds)
            return ()
        ready: list[Any] = self._ray.wait(handles, num_returns=1, timeout=seconds)[0]
        return ready

    def result(self, handle: Any) -> Result:
        """Return how a task ended."""
        from ray.exceptions import RayError, RayTaskError, RuntimeEnvSetupError, TaskCancelledError

        try:
            return Result(self._ray.get(handle))
        except TaskCancelledError:
            return Result()
        except (RayTaskError, RuntimeEnvSetupError) as error:
            return Result(why=str(error).strip().splitlines()[-1])
        except RayError as error:
            return Result(why=f"{type(error).__name__}: {error}", is_lost=True)

    def cancel(self, handle: Any) -> None:
        """Cancel a task that has not begun."""
        self._ray.cancel(handle)

    def close(self) -> None:
        self._ray.shutdown()


class Driver:
    """Runs a campaign's wanted runs to their end."""

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
        """Work until all wanted runs are over, or another driver is in charge."""
        self._home.read_events()
        self._elsewhere = {run_id for run_id, files in files_of_runs(self._files).items() if is_alive(files)}
        for event in list(self._home.last.values()):
            if event.what == GIVEN:
                self._write(event, LOST, Result(why="with the driver that submitted it to Ray"))
        while self._goes_on():
            pass

    def _goes_on(self) -> bool:
        try:
            terms = self._home.terms()
            is_in_charge = terms.driver == self._number
            is_watched = bool(
                readable(is_held, self._files.lock)
            )  # an orchestrator's retry policy then applies
            wanted = self._open() if is_in_charge and not self._obey() else {}
            self._elsewhere = {run_id for run_id in self._elsewhere if is_alive(self._home.run(run_id))}
            self._take_back(wanted, is_in_charge)
            self._fill(wanted, terms, is_watched)
            # an orchestrator may resubmit some of these runs: retries wait for their backoff
            may_be_needed = is_in_charge and is_watched and not self._wish
            if not self._tasks and not wanted and not may_be_needed:
                return False
            for handle in self._cluster.wait(list(self._tasks), LOOK_S):
                self._conclude(self._tasks.pop(handle), self._cluster.result(handle), is_in_charge)
        except RecordsError as error:
            if not may_pass(error):
                raise
            time.sleep(LOOK_S)  # the disk is full, or the file server is unreachable
        return True

    def _open(self) -> dict[str, int]:
        """Return the wanted runs that are not over, with their numbers."""
        found = {}
        for run_id, number in self._home.wanted().items():
            last = self._home.last.get(run_id)
            if last is not None and last.number == number:
                is_open = last.what == GIVEN or (last.what == LOST and last.life < MOST_LIVES)
            else:
                is_open = last is None or last.number < number
            if is_open:
                found[run_id] = number
        return found

    def _obey(self) -> int:
        """Pass a stop request on to the workers; return the request."""
        wish = max(self._wish, asked_to_stop(self._files))
        for event in self._tasks.values() if wish else ():
            self._home.stop(event.run_id, event.number, now=wish > 1)
        return wish

    def _take_back(self, wanted: Mapping[str, int], is_in_charge: bool) -> None:
        for handle, event in self._tasks.items():
            if wanted.get(event.run_id) != event.number and not self._home.has_begun(event):
                if is_in_charge:  # otherwise it exits by itself, and the next driver may run the same number
                    self._home.stop(event.run_id, event.number, now=False)
                self._cluster.cancel(handle)

    def _fill(self, wanted: Mapping[str, int], terms: Terms, is_watched: bool) -> None:
        """Submit wanted runs up to the cap; lost ones only if no orchestrator decides on them."""
        busy = {event.run_id for event in self._tasks.values()} | self._elsewhere
        for run_id, number in wanted.items():
            last = self._home.event(run_id, number)
            if run_id in busy or (last is not None and last.what == LOST and is_watched):
                continue
            if len(busy) >= terms.workers:
                return
            event = TaskEvent(run_id, number, last.life + 1 if last else 1, GIVEN, self._number)
            self._home.write_event(event)
            arguments = self._home.task_arguments(event)
            self._tasks[self._cluster.start(event.name, arguments, terms.options)] = event
            busy.add(run_id)

    def _conclude(self, event: TaskEvent, result: Result, is_in_charge: bool) -> None:
        files = self._home.run(event.run_id)
        if result.exit_code == EXIT_INFRASTRUCTURE and is_alive(files):
            self._elsewhere.add(event.run_id)  # by a worker that outlives its node's connection
            result = Result(why="another worker holds the run", is_lost=True)
        if is_in_charge:
            if result.why:
                words = files.directory / f"engine-ray.{event.number}.{event.life}.out"
                write_atomic(words, f"{result.why}\n")
            self._write(event, LOST if result.is_lost else OVER, result)

    def _write(self, event: TaskEvent, what: str, result: Result) -> None:
        code, why = result.exit_code, plain(result.why, 400)
        self._home.write_event(replace(event, what=what, driver=self._number, exit_code=code, why=why))


@contextmanager
def own_ray(home: Home) -> Iterator[dict[str, Any]]:
    """Return arguments of `ray.init`, for a Ray of its own; none if a cluster started this driver."""
    if os.environ.get("RAY_ADDRESS") != LOCAL:
        yield {}
        return
    until = time.monotonic() + PATIENCE_S
    while (lock := hold(home.lock)) is None:
        if time.monotonic() > until:
            raise EngineDownError(f"{home.lock}: an earlier driver does not exit")
        time.sleep(0.2)
    # a short name: a socket's path has its limits
    with lock, tempfile.TemporaryDirectory(prefix="retrain-ray-", ignore_cleanup_errors=True) as temporary:
        yield {
            "include_dashboard": False,
            "object_store_memory": MEMORY,
            "_node_ip_address": HOST,
            "_temp_dir": temporary,
        }


def main(campaign: Path, number: int) -> int:
    """Run as the driver; return an exit code."""
    home = Home(campaign)
    with own_ray(home) as options, closing(Cluster(options)) as cluster:
        driver = Driver(home, number, cluster)
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: driver.leave())
        driver.drive()
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
