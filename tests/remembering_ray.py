"""A Ray that only remembers what it was told, and a launcher on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from retrain.config.engines import Ray
from retrain.launchers import Assignment, Begun, Ended
from retrain.launchers import asking as _asking
from retrain.launchers._ray_client import Client, Job
from retrain.launchers.ray import RayLauncher


class Jobs(Client):
    """A cluster that does nothing but remember, as Ray does: no id is taken twice."""

    def __init__(self) -> None:
        super().__init__()
        self.all: dict[str, Job] = {}
        self.stopped: list[str] = []
        self.fails: Exception | None = None
        self.refuses: Exception | None = None

    def submit(self, job: str, entrypoint: str, ask: Mapping[str, Any]) -> bool:
        self._fail()
        if self.refuses is not None:
            raise self.refuses
        if job in self.all:
            return False
        self.all[job] = Job(job, "PENDING", metadata=ask["metadata"])
        return True

    def jobs(self) -> list[Job]:
        self._fail()
        return list(self.all.values())

    def stop(self, job: str) -> None:
        self.stopped.append(job)

    def becomes(self, job: str, status: str, **changes: Any) -> None:
        self.all[job] = replace(self.all[job], status=status, **changes)

    def having(self, *states: str) -> list[str]:
        return [name for name, job in self.all.items() if job.status in states]

    def _fail(self) -> None:
        if self.fails is not None:
            raise self.fails


def assignment(directory: Path, runs: int = 3, **changes: Any) -> Assignment:
    named = {f"r{n}": directory / "runs" / f"r{n}" for n in range(runs)}
    for path in named.values():
        path.mkdir(parents=True, exist_ok=True)
    (directory / "campaign.toml").touch()
    plain = Assignment(directory.name, directory, named, workers=runs, permits=None, where=directory)
    return replace(plain, **changes)


def launcher(given: Assignment, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> RayLauncher:
    monkeypatch.setattr(_asking, "LEAST_POLL_S", 0.0)
    made = RayLauncher(given, Ray())
    made._client = jobs
    return made


def look(made: RayLauncher) -> list[Begun | Ended]:
    made._asking.hurry()
    return list(made.poll(0))
