"""Which runs a campaign wants of Ray, in files that all its machines see: the directory `ray/`.

`wanted.json` names every run that is to be worked on, with the number of its job: only the orchestrator
writes it. At most so many jobs are with Ray at a time; whoever has a place free (the orchestrator, or a
job whose worker has left) takes the first wanted run that nobody has taken (`_ray_marks`), and submits a
job for it: campaign, run and number, an id that Ray takes once. A job that is not wanted any more when it
starts leaves at once: what was taken back, or given a higher number, never runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.errors import LaunchError, RecordsError
from retrain.launchers._ray_client import Client, Job
from retrain.launchers._ray_marks import Marks
from retrain.locks.held import is_held
from retrain.records.atomic import read_json, write_json
from retrain.records.files import make_directory
from retrain.records.layout import CampaignFiles, RunFiles, is_single_run

HOME = "ray"  # below the campaign's directory


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for all jobs of a campaign."""

    ask: Mapping[str, Any] = field(default_factory=dict)  # of Ray, as `submit_job` takes it
    share_s: float = 0.0  # a run shorter than this leaves its job to the next run
    look_s: float = 60.0  # how often jobs look after each other while no orchestrator does


class Queue:
    """A campaign's wishes, and who has acted on them."""

    def __init__(self, campaign: Path) -> None:
        self.campaign = campaign
        self.home = campaign / HOME
        self._wanted = self.home / "wanted.json"
        self._terms = self.home / "terms.json"
        self._killed = self.home / "killed"
        self._retired = self.home / "retired"
        self.marks = Marks(self.home / "taken")

    def prepare(self, terms: Terms) -> None:
        """Make the directories, and keep what holds for all jobs."""
        for directory in (self.home, self._killed, self._retired):
            make_directory(directory)
        self.marks.prepare()
        facts = {"ask": dict(terms.ask), "share_s": terms.share_s, "look_s": terms.look_s}
        write_json(self._terms, facts)

    def terms(self) -> Terms:
        """Return what holds for all jobs.

        Raises:
            RecordsError: the file cannot be read.
        """
        found = read_json(self._terms) or {}
        return Terms(**{name: value for name, value in found.items() if name in Terms.__slots__})

    def want(self, numbers: Mapping[str, int]) -> None:
        """Say which runs are wanted, in the order in which they are to start, each as which job."""
        if self.home.is_dir():
            write_json(self._wanted, {"runs": dict(numbers)})

    def wanted(self) -> dict[str, int]:
        """Return the wanted runs and the numbers of their jobs.

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

    def newest(self, jobs: Iterable[str]) -> dict[str, int]:
        """Return the newest number that was used for each run, by these ids of jobs or by our own marks."""
        newest = self.marks.newest()
        for run_id, number in filter(None, map(self.parse, jobs)):
            newest[run_id] = max(newest.get(run_id, 0), number)
        return newest

    def id_of(self, run_id: str, number: int) -> str:
        """Name a run's job."""
        return f"{self.campaign.name}.{run_id}.{number}"

    def job_of(self, run_id: str, number: int) -> str:
        """Name the job that works on a run: its own, or the one that has taken it on."""
        taken = self.marks.read(run_id, number)
        return (taken.job if taken else "") or self.id_of(run_id, number)

    def parse(self, job: str) -> tuple[str, int] | None:
        """Return the run and the number that an id names; None if it is no job of this campaign."""
        prefix = f"{self.campaign.name}."
        run_id, _, number = job.removeprefix(prefix).rpartition(".")
        return (run_id, int(number)) if job.startswith(prefix) and run_id and number.isdigit() else None

    def is_ours(self, job: Job) -> bool:
        """Whether a job belongs to this campaign, and not to a copy of it."""
        path = Path(job.metadata.get("retrain_campaign", ""))
        try:
            return path == self.campaign or not path.exists() or path.samefile(self.campaign)
        except OSError:
            return True

    def wants(self, job: str) -> bool:
        """Whether a job that starts is to do its work."""
        named = self.parse(job)
        if named is None:
            return False
        number = self.wanted().get(named[0])  # a higher one replaces a job that was lost
        return number is not None and named[1] >= number

    def mark_killed(self, run_id: str, number: int) -> None:
        """Have a job end its worker at once."""
        if self._killed.is_dir():
            (self._killed / f"{run_id}.{number}").touch()

    def is_killed(self, run_id: str, number: int) -> bool:
        """Whether a job is to end its worker at once."""
        return (self._killed / f"{run_id}.{number}").exists()

    def retire(self, job: str) -> None:
        """Have a job that Ray has forgotten take no more runs on: its place is given to another."""
        if self._retired.is_dir() and self.parse(job) is not None:
            (self._retired / job).touch()

    def is_retired(self, job: str) -> bool:
        """Whether a job is to take no more runs on."""
        return (self._retired / job).exists()

    def untaken(self) -> Iterator[tuple[str, int]]:
        """Return the wanted runs that nobody has taken on, in order. Raises as `wanted` does."""
        wanted = self.wanted()
        newest = self.marks.newest() if wanted else {}
        yield from ((run_id, number) for run_id, number in wanted.items() if newest.get(run_id, 0) < number)

    def leaves_only_lost(self) -> bool:
        """Whether all runs are taken, and some neither over nor alive. Raises as `wanted` does."""
        if any(self.untaken()):
            return False
        open_runs = [
            run_id
            for run_id, number in self.marks.newest().items()
            if (taken := self.marks.read(run_id, number)) is not None and taken.exit_code is None
        ]
        return bool(open_runs) and not any(map(self.is_alive, open_runs))

    def is_alive(self, run_id: str) -> bool:
        """Whether a worker holds a run's lock."""
        return is_held(RunFiles(self.directory_of(run_id)).lock)

    def fill(self, client: Client, places: int) -> list[str]:
        """Take wanted runs on that nobody has, in order, and submit a job for each; gives their ids.

        Raises:
            EngineDownError: the cluster does not answer.
            LaunchError: it refuses.
            RecordsError: files cannot be read or written.
        """
        submitted: list[str] = []
        if places <= 0:
            return submitted
        ask = self.terms().ask
        for run_id, number in self.untaken():
            if self.submit(client, run_id, number, ask):
                submitted.append(run_id)
            if len(submitted) >= places:
                break
        return submitted

    def submit(self, client: Client, run_id: str, number: int, ask: Mapping[str, Any]) -> bool:
        """Submit a run's job; False if somebody else has taken the run on. Raises as `fill` does."""
        job = self.id_of(run_id, number)
        if not self.marks.take(run_id, number, job):
            return False
        try:
            return client.submit(job, self.entrypoint(run_id, number), ask)
        except LaunchError:
            self.marks.give_back(run_id, number)
            raise

    def directory_of(self, run_id: str) -> Path:
        """Return a run's directory."""
        alone = is_single_run(self.campaign)
        return self.campaign if alone else CampaignFiles(self.campaign).run(run_id).directory

    def entrypoint(self, run_id: str, number: int) -> str:
        """Return a job's command."""
        run = self.directory_of(run_id)
        return shlex.join(["bash", str(self.home / "job.sh"), str(run), self.id_of(run_id, number)])
