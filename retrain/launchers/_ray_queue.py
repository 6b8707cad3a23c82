"""Which jobs a campaign wants of Ray, in files that all its machines see: the directory `ray/`.

`wanted.json` names every run that is to be worked on, with the number of its job: only the orchestrator
writes it. At most so many jobs are with Ray at a time; whoever has a place free (the orchestrator, or a
job whose worker has left) submits the first wanted run that nobody has. Both use the same id for it,
campaign, run and number, so of two that try Ray takes one. A job that is not wanted any more when it
starts leaves at once: what was taken back, or given a new number, never runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from retrain.errors import RecordsError
from retrain.launchers._ray_client import Client, Job
from retrain.records.atomic import read_json, write_json
from retrain.records.files import make_directory
from retrain.records.layout import CampaignFiles, is_single_run

HOME = "ray"  # below the campaign's directory


class Queue:
    """A campaign's wishes, and who has acted on them."""

    def __init__(self, campaign: Path) -> None:
        self.campaign = campaign
        self.home = campaign / HOME
        self._wanted = self.home / "wanted.json"
        self._ask = self.home / "ask.json"
        self._submitted = self.home / "submitted"
        self._killed = self.home / "killed"

    def prepare(self, ask: Mapping[str, Any]) -> None:
        """Make the directory, and keep what every job asks for."""
        for directory in (self.home, self._submitted, self._killed):
            make_directory(directory)
        write_json(self._ask, dict(ask))

    def want(self, numbers: Mapping[str, int]) -> None:
        """Say which runs are wanted, in the order in which they are to start, each as which job."""
        if self.home.is_dir():
            write_json(self._wanted, {"runs": dict(numbers)})

    def wanted(self) -> dict[str, int]:
        """Give the wanted runs and the numbers of their jobs.

        Raises:
            RecordsError: the file cannot be read.
        """
        found = read_json(self._wanted) if self.home.is_dir() else None
        runs = (found or {}).get("runs", {})
        if not isinstance(runs, dict) or not all(isinstance(number, int) for number in runs.values()):
            raise RecordsError(
                f"{self._wanted}: is damaged; `retrain resume {self.campaign}` writes it again"
            )
        return dict(runs)

    def submitted(self) -> dict[str, int]:
        """Give the newest number under which each run was submitted."""
        newest: dict[str, int] = {}
        marks = self._submitted.iterdir() if self._submitted.is_dir() else ()
        for mark in marks:
            run_id, _, number = mark.name.rpartition(".")
            if number.isdigit():
                newest[run_id] = max(newest.get(run_id, 0), int(number))
        return newest

    def newest(self, jobs: Iterable[str]) -> dict[str, int]:
        """Give the newest number that was used for each run, by these ids of jobs or by our own marks."""
        newest = self.submitted()
        for run_id, number in filter(None, map(self.parse, jobs)):
            newest[run_id] = max(newest.get(run_id, 0), number)
        return newest

    def id_of(self, run_id: str, number: int) -> str:
        """Name a run's job."""
        return f"{self.campaign.name}.{run_id}.{number}"

    def parse(self, job: str) -> tuple[str, int] | None:
        """Give the run and the number that an id names; None if it is no job of this campaign."""
        prefix = f"{self.campaign.name}."
        run_id, _, number = job.removeprefix(prefix).rpartition(".")
        return (run_id, int(number)) if job.startswith(prefix) and run_id and number.isdigit() else None

    def is_ours(self, job: Job) -> bool:
        """Tell whether a job belongs to this campaign, and not to a copy of it."""
        path = Path(job.metadata.get("retrain_campaign", ""))
        try:
            return path == self.campaign or not path.exists() or path.samefile(self.campaign)
        except OSError:
            return True

    def wants(self, job: str) -> bool:
        """Tell whether a job that starts is to do its work."""
        named = self.parse(job)
        return named is not None and self.wanted().get(named[0]) == named[1]

    def mark_killed(self, run_id: str, number: int) -> None:
        """Have a job end its worker at once."""
        if self._killed.is_dir():
            (self._killed / f"{run_id}.{number}").touch()

    def is_killed(self, job: str) -> bool:
        """Tell whether a job is to end its worker at once."""
        named = self.parse(job)
        return named is not None and (self._killed / f"{named[0]}.{named[1]}").exists()

    def fill(self, client: Client, places: int) -> list[str]:
        """Submit wanted runs that nobody has submitted, in order; gives their ids.

        Raises:
            EngineDownError: the cluster does not answer.
            LaunchError: it refuses.
        """
        taken: list[str] = []
        wanted = self.wanted() if places > 0 else {}
        submitted = self.submitted() if wanted else {}
        ask = (read_json(self._ask) or {}) if wanted else {}
        for run_id, number in wanted.items():
            if len(taken) >= places:
                break
            if submitted.get(run_id, 0) >= number:
                continue
            if client.submit(self.id_of(run_id, number), self.entrypoint(run_id, number), ask):
                taken.append(run_id)
            (self._submitted / f"{run_id}.{number}").touch()
        return taken

    def entrypoint(self, run_id: str, number: int) -> str:
        """Give a job's command."""
        alone = is_single_run(self.campaign)
        run = self.campaign if alone else CampaignFiles(self.campaign).run(run_id).directory
        return shlex.join(["bash", str(self.home / "job.sh"), str(run), self.id_of(run_id, number)])
