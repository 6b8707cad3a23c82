"""The job of a campaign on the cluster: submits its runs to Ray as tasks, up to the cap at a time.

`python -m retrain.launchers.ray.driver CAMPAIGN NUMBER` runs on the head until all wanted runs are over and
no live orchestrator could submit more. A task that Ray lost (with its node, or out of memory) is resubmitted
by the orchestrator's retry policy while an orchestrator lives, otherwise by the driver. Workers of an earlier
driver may outlive it by a minute; they count against the cap until they exit.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from retrain.errors import EXIT_DONE, EXIT_INFRASTRUCTURE, RecordsError, may_pass
from retrain.launchers.engine_watch import is_alive
from retrain.launchers.ray.home import GIVEN, LOST, OVER, Event, Home, Ledger, Terms
from retrain.launchers.ray.local import own_ray
from retrain.locks.held import is_held
from retrain.records.atomic import write_atomic
from retrain.records.layout import CampaignFiles
from retrain.records.stop_request import asked_to_stop
from retrain.records.text import plain

LOOK_S = 1.0
MOST_LIVES = 4  # of one run without an orchestrator: the run itself may be killing its nodes


@dataclass(frozen=True, slots=True)
class Result:
    """How a task ended."""

    exit_code: int | None = None
    why: str = ""
    is_lost: bool = False


class Cluster(Protocol):
    """Where tasks run."""

    def start(self, name: str, arguments: Sequence[str], options: Mapping[str, Any]) -> Any:
        """Call `task.work` on a node as soon as one has room; return the task's handle."""
        ...

    def wait(self, handles: Sequence[Any], seconds: float) -> Collection[Any]:
        """Wait until a task has ended, or for the timeout; return the ended tasks."""
        ...

    def result(self, handle: Any) -> Result:
        """Return how a task ended."""
        ...

    def cancel(self, handle: Any) -> None:
        """Cancel a task that has not begun."""
        ...


class Driver:
    """Runs a campaign's wanted runs to their end."""

    def __init__(self, home: Home, number: int, cluster: Cluster) -> None:
        self._home = home
        self._number = number
        self._cluster = cluster
        self._files = CampaignFiles(home.campaign)
        self._ledger = Ledger(home)
        self._tasks: dict[Any, Event] = {}
        self._elsewhere: set[str] = set()  # runs whose worker belongs to no task
        self._wish = 0  # 1: save and exit, 2: end at once

    def leave(self) -> None:
        """Ask all workers to save and exit; for signal handlers."""
        self._wish = max(self._wish, 1)

    def drive(self) -> None:
        """Work until all wanted runs are over, or another driver is in charge.

        Raises:
            RecordsError: the campaign's files cannot be read or written.
        """
        self._ledger.read()
        self._elsewhere = {run_id for run_id in self._home.run_ids() if self._is_alive(run_id)}
        for event in list(self._ledger.last.values()):
            if event.what == GIVEN:
                self._write(event, LOST, why="with the driver that submitted it to Ray")
        while self._goes_on():
            pass

    def _goes_on(self) -> bool:
        try:
            terms = self._home.terms()
            is_in_charge = terms.driver == self._number
            wanted = self._open() if is_in_charge and not self._obey() else {}
            self._elsewhere = set(filter(self._is_alive, self._elsewhere))
            self._take_back(wanted, is_in_charge)
            self._fill(wanted, terms)
            if not self._tasks and not wanted and not (is_in_charge and self._may_be_needed()):
                return False
            for handle in self._cluster.wait(list(self._tasks), LOOK_S):
                self._conclude(self._tasks.pop(handle), self._cluster.result(handle), is_in_charge)
        except RecordsError as error:
            if not may_pass(error):
                raise
            time.sleep(LOOK_S)  # the disk is full, or the file server is unreachable
        return True

    def _may_be_needed(self) -> bool:
        """Whether an orchestrator may resubmit some of these runs: retries wait for their backoff."""
        return not self._wish and self._is_watched()

    def _open(self) -> dict[str, int]:
        """Return the wanted runs that are not over, with their numbers."""
        wanted = self._home.wanted().items()
        return {run_id: number for run_id, number in wanted if self._is_open(run_id, number)}

    def _is_open(self, run_id: str, number: int) -> bool:
        last = self._ledger.last.get(run_id)
        if last is None or number > last.number:
            return True
        return number == last.number and (
            last.what == GIVEN or (last.what == LOST and last.life < MOST_LIVES)
        )

    def _obey(self) -> int:
        """Pass a stop request on to the worker; return the request."""
        wish = max(self._wish, asked_to_stop(self._files))
        if wish:
            for event in self._tasks.values():
                self._home.stop(event.run_id, event.number, now=wish > 1)
        return wish

    def _take_back(self, wanted: dict[str, int], is_in_charge: bool) -> None:
        for handle, event in self._tasks.items():
            if wanted.get(event.run_id) != event.number and not self._home.has_begun(event.name):
                if is_in_charge:  # otherwise it exits by itself, and the next driver may run the same number
                    self._home.stop(event.run_id, event.number, now=False)
                self._cluster.cancel(handle)

    def _fill(self, wanted: dict[str, int], terms: Terms) -> None:
        busy = {event.run_id for event in self._tasks.values()} | self._elsewhere
        places = terms.workers - len(busy)
        for event in self._next(wanted, busy) if places > 0 else ():
            self._ledger.write(event)
            arguments = self._home.task_arguments(event)
            self._tasks[self._cluster.start(event.name, arguments, terms.options)] = event
            places -= 1
            if not places:
                break

    def _next(self, wanted: dict[str, int], busy: Collection[str]) -> Iterator[Event]:
        is_watched = self._is_watched() if any(self._lost(wanted)) else False
        for run_id, number in wanted.items():
            last = self._ledger.of(run_id, number)
            if run_id in busy or (last is not None and last.what == LOST and is_watched):
                continue
            yield Event(run_id, number, last.life + 1 if last else 1, GIVEN, self._number)

    def _lost(self, wanted: dict[str, int]) -> Iterator[Event]:
        found = (self._ledger.of(run_id, number) for run_id, number in wanted.items())
        return (event for event in found if event is not None and event.what == LOST)

    def _is_watched(self) -> bool:
        """Whether an orchestrator lives; its retry policy then applies."""
        try:
            return is_held(self._files.lock)
        except RecordsError:
            return False

    def _is_alive(self, run_id: str) -> bool:
        return is_alive(self._home.run(run_id))

    def _conclude(self, event: Event, result: Result, is_in_charge: bool) -> None:
        if result.exit_code == EXIT_INFRASTRUCTURE and self._is_alive(event.run_id):
            self._elsewhere.add(event.run_id)  # by a worker that outlives its node's connection
            result = Result(why="another worker holds the run", is_lost=True)
        if not is_in_charge:
            return
        if result.why:
            words = self._home.run(event.run_id).directory / f"engine-ray.{event.number}.{event.life}.out"
            write_atomic(words, f"{result.why}\n")
        self._write(event, LOST if result.is_lost else OVER, result.exit_code, result.why)

    def _write(self, event: Event, what: str, exit_code: int | None = None, why: str = "") -> None:
        news = replace(event, what=what, driver=self._number, exit_code=exit_code, why=plain(why, 400))
        self._ledger.write(news)


class RayCluster:
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
        # no retries by Ray: what happens to a lost run depends on whether an orchestrator lives
        return self._work.options(name=name, max_retries=0, **options).remote(arguments)

    def wait(self, handles: Sequence[Any], seconds: float) -> Collection[Any]:
        if not handles:
            time.sleep(seconds)
            return ()
        ready: list[Any] = self._ray.wait(handles, num_returns=1, timeout=seconds)[0]
        return ready

    def result(self, handle: Any) -> Result:
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
        self._ray.cancel(handle)

    def close(self) -> None:
        self._ray.shutdown()


def main(campaign: Path, number: int) -> int:
    """Run as the driver; return an exit code."""
    home = Home(campaign)
    with own_ray(home) as options, closing(RayCluster(options)) as cluster:
        driver = Driver(home, number, cluster)
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: driver.leave())
        driver.drive()
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
