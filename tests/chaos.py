"""Kills real processes of real campaigns until they are done, and says what that cost.

Nothing here knows how the product recovers: it starts `retrain`, sends SIGKILL to processes of the
campaign's directory at random moments, starts `retrain resume` when the orchestrator is gone, and
compares what is on disk with a campaign that nobody disturbed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from retrain.base.errors import RecordsError
from retrain.base.locks import holder, is_held
from retrain.control.semaphore import FileSemaphore
from retrain.records.layout import RunFiles
from retrain.records.manifest import read_manifest
from retrain.records.run_state import read_attempts
from tests.scanned import scan_metrics

ROOT = Path(__file__).parent.parent
PERMITS = 2
STEPS = 8
TOML = f"""
[training]
batch_size = 2
group_size = 4
max_tokens = 4
temperature = 1.0
lr = 5e-3
lr_schedule = "cosine"
save_every = 1
keep_checkpoints = 2
[data]
task = "successor"
eval_prompts = 4
[backend]
max_concurrent = {PERMITS}
[backend.options]
api_latency_s = 0.04
[campaign]
seeds = [0, 1]
max_steps = {STEPS}
parallel = true
max_workers = 4
retries = 100
pause_after = 0
[[campaign.conditions]]
name = "grpo"
advantage_mode = "grpo"
[[campaign.conditions]]
name = "maxrl"
"""
KEYS = ("step", "loss", "mean_reward", "grad_norm", "lr", "batch_size", "tokens_per_step")
MOST_FRUITLESS = 2  # orchestrators killed in a row without a worker; a slow machine would start none at all
DEAD_AFTER_S = 100.0  # a worker that was starting when everything was done leaves by itself


@dataclass
class Tally:
    """What was done to campaigns, and what came of it."""

    campaigns: int = 0
    kills: int = 0
    worker_kills: int = 0
    orchestrator_kills: int = 0
    attempts: int = 0
    steps_lost: int = 0
    steps_twice: int = 0
    rows_differ: int = 0
    unreadable: int = 0
    orphans: int = 0
    over_admissions: int = 0
    looks_at_permits: int = 0
    most_holders: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether every promise was kept."""
        bad = (self.steps_lost, self.steps_twice, self.rows_differ, self.unreadable, self.orphans)
        return not any(bad) and self.over_admissions == 0

    def add(self, other: Tally) -> None:
        """Count another campaign's numbers in."""
        for field in fields(self):
            mine, its = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, max(mine, its) if field.name == "most_holders" else mine + its)


class Chaos:
    """Campaigns in one directory, disturbed with one source of chance."""

    def __init__(self, directory: Path, seed: int, mean_pause_s: float = 0.15) -> None:
        self._directory = directory
        self._chance = random.Random(seed)
        self._mean_pause_s = mean_pause_s
        self._fruitless = self._killed = 0
        (directory / "chaos.toml").write_text(TOML)
        undisturbed = self._start("run", "chaos.toml")
        if undisturbed.wait() != 0:
            raise RuntimeError(f"the undisturbed campaign failed; see {directory}/orchestrator.log")
        self._expected = _rows(self._newest())

    def disturb(self, kills: int) -> Tally:
        """Disturb campaigns until so many kills were sent; the last campaign is then left to finish."""
        total = Tally()
        while total.kills < kills:
            total.add(self._disturb_one(kills - total.kills))
        return total

    def _disturb_one(self, most_kills: int) -> Tally:
        tally = Tally(campaigns=1)
        before = set((self._directory / "logs").iterdir())
        orchestrator = self._start("run", "chaos.toml")
        while not (made := set((self._directory / "logs").iterdir()) - before) or not _is_ready(*made):
            time.sleep(0.01)
            if orchestrator.poll() is not None:
                raise RuntimeError("the campaign did not start")
        (campaign,) = made
        while True:
            code = orchestrator.poll()
            if code == 0:
                break
            if code is not None:  # killed, or some runs have no retries left
                orchestrator = self._start("resume", str(campaign))
            self._look(campaign, tally)
            kill_at = time.monotonic() + self._chance.expovariate(1 / self._mean_pause_s)
            while time.monotonic() < kill_at:
                _count_holders(campaign, tally)
                time.sleep(0.01)
            if tally.kills < most_kills:
                self._kill_one(campaign, orchestrator, tally)
        self._judge(campaign, tally)
        return tally

    def _kill_one(self, campaign: Path, orchestrator: subprocess.Popen[bytes], tally: Tally) -> None:
        holding = {holder_of(RunFiles(run).lock) for run in (campaign / "runs").iterdir()}
        if any(holding):
            self._fruitless = 0
        elif self._fruitless == MOST_FRUITLESS:
            return
        holding.add(holder_of(campaign / "campaign.lock"))
        starting = {orchestrator.pid, *_workers(campaign)} - holding
        victims = sorted(pid for pid in holding if pid)
        if starting and self._chance.random() < 0.1:  # more would keep anything from getting anywhere
            victims = sorted(starting)
        if not victims:
            return
        wants_orchestrator = self._killed % 3 == 0  # if there is one, else a worker, and the reverse
        of_kind = [pid for pid in victims if (pid == orchestrator.pid) == wants_orchestrator]
        victim = self._chance.choice(of_kind or victims)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        self._killed += 1
        tally.kills += 1
        self._fruitless += victim == orchestrator.pid
        tally.orchestrator_kills += victim == orchestrator.pid
        tally.worker_kills += victim != orchestrator.pid

    def _look(self, campaign: Path, tally: Tally) -> None:
        with _counting(tally):
            read_manifest(campaign / "manifest.json")
        for run in (campaign / "runs").iterdir():
            with _counting(tally):
                read_attempts(RunFiles(run).attempts)
                tally.unreadable += scan_metrics(run).skipped_lines > 1  # one may be half-written right now

    def _judge(self, campaign: Path, tally: Tally) -> None:
        rows = _rows(campaign)
        for name, expected in self._expected.items():
            steps = [row[0] for row in rows.get(name, [])]
            tally.steps_lost += len(set(range(1, STEPS + 1)) - set(steps))
            tally.steps_twice += len(steps) - len(set(steps))
            tally.rows_differ += rows.get(name) != expected
            files = RunFiles(campaign / "runs" / name)
            numbers = [attempt.number for attempt in read_attempts(files.attempts)]
            tally.attempts += len(numbers)
            tally.unreadable += (
                numbers != list(range(1, len(numbers) + 1)) or scan_metrics(files.directory).skipped_lines
            )
            tally.orphans += is_held(files.lock)
        deadline = time.monotonic() + DEAD_AFTER_S
        while (left := _workers(campaign)) and time.monotonic() < deadline:
            time.sleep(0.05)
        tally.orphans += len(left)
        tally.over_admissions += len(FileSemaphore.inspect(campaign / "permits").holders) > 0

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._directory / "orchestrator.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "retrain", *arguments],
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def _newest(self) -> Path:
        return max((self._directory / "logs").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def _count_holders(campaign: Path, tally: Tally) -> None:
    if (campaign / "permits" / "permits.json").exists():
        with _counting(tally):
            holders = len(FileSemaphore.inspect(campaign / "permits").holders)
            tally.looks_at_permits += 1
            tally.most_holders = max(tally.most_holders, holders)
            tally.over_admissions += holders > PERMITS


@contextlib.contextmanager
def _counting(tally: Tally) -> Iterator[None]:
    try:
        yield
    except RecordsError:
        tally.unreadable += 1


def _rows(campaign: Path) -> dict[str, list[tuple[object, ...]]]:
    return {
        run.name: [tuple(row[key] for key in KEYS) for row in scan_metrics(run).rows]
        for run in sorted((campaign / "runs").iterdir())
    }


def holder_of(lock: Path) -> int:
    found = holder(lock) if is_held(lock) else None
    return found.pid if found else 0


def _is_ready(campaign: Path) -> bool:
    return is_held(campaign / "campaign.lock") and holder(campaign / "campaign.lock") is not None


def _workers(campaign: Path) -> set[int]:
    """Workers of a campaign, as the system lists processes: also those that hold no lock yet."""
    found = set()
    for pid in (path.name for path in Path("/proc").iterdir() if path.name.isdigit()):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"retrain.trainer.worker" in words and any(w.startswith(os.fsencode(campaign)) for w in words):
                found.add(int(pid))
    return found
