"""A Ray that is made of threads, a Jobs API that remembers what it was told, and campaigns for both."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from retrain.campaign.launchers import Assignment, Begun, Ended
from retrain.campaign.launchers.ray import RayLauncher, task
from retrain.campaign.launchers.ray.client import JobsClient, RayJob
from retrain.campaign.launchers.ray.driver import Driver
from retrain.campaign.launchers.ray.home import LOST, OVER, Home, Orders, TaskEvent


class Threads:
    """A cluster whose tasks are threads, so many of them at a time; each runs the task's own code."""

    def __init__(self, room: int = 8) -> None:
        self._pool = ThreadPoolExecutor(room)
        self.started: list[str] = []
        self.options: list[Mapping[str, Any]] = []
        self.loses: list[str] = []  # names of tasks that are lost, however they end
        self.most = 0
        self.first_poll = lambda: None

    def start(self, name: str, arguments: Sequence[str], options: Mapping[str, Any]) -> Future[int | None]:
        self.started.append(name)
        self.options.append(options)
        made = self._pool.submit(task.work, *arguments)
        made.name = name  # type: ignore[attr-defined]
        return made

    def wait(self, handles: Sequence[Any], seconds: float) -> Collection[Any]:
        self.most = max(self.most, len(handles))
        self.first_poll()
        if not handles:
            time.sleep(0.01)
        cancelled = [handle for handle in handles if handle.cancelled()]
        return cancelled or wait(handles, seconds, FIRST_COMPLETED).done

    def ended(self, handle: Any, event: TaskEvent) -> TaskEvent:
        if handle.cancelled():
            return replace(event, what=OVER)
        if handle.name in self.loses:
            return replace(event, what=LOST, why="NodeDiedError: gone")
        error = handle.exception()
        if error:
            return replace(event, what=OVER, why=f"{type(error).__name__}: {error}")
        return replace(event, what=OVER, exit_code=handle.result())

    def cancel(self, handle: Any) -> None:
        handle.cancel()


class Jobs(JobsClient):
    """A Jobs API that does nothing but remember, as Ray does: no id is taken twice."""

    def __init__(self) -> None:
        super().__init__()
        self.all: dict[str, RayJob] = {}
        self.stopped: list[str] = []
        self.entrypoints: list[str] = []
        self.questions = 0
        self.fails: Exception | None = None
        self.refuses: Exception | None = None

    def submit(self, job: str, entrypoint: str, ask: Mapping[str, Any]) -> bool:
        self._fail()
        if self.refuses is not None:
            raise self.refuses
        if job in self.all:
            return False
        self.all[job] = RayJob(job, "RUNNING", metadata=ask["metadata"])
        self.entrypoints.append(entrypoint)
        return True

    def job(self, job: str) -> RayJob | None:
        self._fail()
        self.questions += 1
        return self.all.get(job)

    def jobs(self) -> list[RayJob]:
        self._fail()
        return list(self.all.values())

    def stop(self, job: str) -> None:
        self.stopped.append(job)

    def becomes(self, job: str, status: str, **changes: Any) -> None:
        self.all[job] = replace(self.all[job], status=status, **changes)

    def _fail(self) -> None:
        if self.fails is not None:
            raise self.fails


def assignment(directory: Path, runs: int = 3, **changes: Any) -> Assignment:
    """A campaign of so many runs, with directories that hold nothing."""
    named = {f"r{n}": directory / "runs" / f"r{n}" for n in range(runs)}
    for path in named.values():
        path.mkdir(parents=True, exist_ok=True)
    (directory / "campaign.toml").touch()
    plain = Assignment(directory.name, directory, named, workers=runs, permits=None, where=directory)
    return replace(plain, **changes)


def home_of(
    directory: Path, runs: int = 3, workers: int = 2, script: str = "exit 0", number: int = 1
) -> Home:
    """What an orchestrator has written when a driver starts: all runs are wanted; the script is given."""
    assignment(directory, runs)
    home = Home(directory)
    home.prepare()
    home.script.write_text(f"module=$1 run=$2\n{script}\n")
    home.write(Orders(number, workers, {"num_cpus": 1}, 1, {f"r{n}": 1 for n in range(runs)}))
    return home


def order(home: Home, **changes: Any) -> None:
    """Change what an orchestrator has written."""
    home.write(replace(home.orders(), **changes))


def drive(home: Home, cluster: Threads | None = None, number: int = 1) -> Threads:
    """Be a driver to its end."""
    cluster = cluster or Threads()
    Driver(home, number, cluster).drive()
    return cluster


def poll(made: RayLauncher) -> list[Begun | Ended]:
    """Have a launcher look at once."""
    made.asking.least_s = 0.0
    made.asking.hurry()
    del made.asking.least_s  # as of all others again
    return list(made.poll(0))
