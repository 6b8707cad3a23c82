"""The campaign that every cluster runs, and this machine alone: what is asked for, and what came of it."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from pathlib import Path

from retrain.base.errors import EXIT_INTERRUPTED
from retrain.base.locks import is_held
from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from retrain.records.run_state import read_attempts
from retrain.results.status import survey
from tests.clocks import without_times
from tests.cluster.waiting import PATIENCE_S

Start = Callable[..., subprocess.Popen[str]]  # starts the command line
WORKERS = 5
STEPS = 12
TOML = f"""
[training]
batch_size = 2
group_size = 4
max_tokens = 4
temperature = 1.0
lr = 5e-3
save_every = 3
[data]
task = "successor"
eval_prompts = 4
[reward]
reward = "tests.plugins.slow"
[campaign]
name = "both"
seeds = [0, 1]
max_steps = {STEPS}
parallel = true
max_workers = {WORKERS}
"""
NAMES = ("c0", "c1", "c2")
CONDITIONS = "".join(
    f'[[campaign.conditions]]\nname = "{name}"\ntraining.lr = {n + 1}e-3\n' for n, name in enumerate(NAMES)
)
PRICED = "[budget.prices.numpy]\nprefill = 40_000\n"  # dollars: about one a step
BROKEN = """
[[campaign.conditions]]
name = "broken"
reward.reward = "tests.plugins.broken"
reward.params = {}
"""


def until(gate: Path, toml: str = TOML) -> str:
    """Return a campaign whose steps take two seconds before there is a file `gate`, and no time after it."""
    table = f'"tests.plugins.slow_until"\nparams = {{ gate = "{gate}", wait_s = 0.25 }}'
    return toml.replace('"tests.plugins.slow"', table)


def numbers(run_dir: Path) -> list[dict[str, object]]:
    """Return a run's rows without what no two machines have in common."""
    return without_times(read_metrics(run_dir))


def results(campaign: Path) -> dict[str, tuple[str, list[dict[str, object]]]]:
    """Return each run's state and rows."""
    found = survey(campaign)[0].runs
    return {run.run_id: (run.state, numbers(campaign / "runs" / run.run_id)) for run in found}


def has_steps(directory: Path) -> bool:
    """Whether a run somewhere below has taken a step; its file of rows is there before."""
    return any(path.stat().st_size for path in directory.rglob("metrics.jsonl"))


def only_campaign(log_dir: Path) -> Path:
    """Return the one campaign in a directory."""
    (found,) = log_dir.iterdir()
    return found


def finish(process: subprocess.Popen[str], seconds: float = PATIENCE_S) -> tuple[int, str]:
    """Wait for a command's end; gives its exit code and what it said."""
    _, said = process.communicate(timeout=seconds)
    return process.returncode, said


@contextmanager
def counting_runs(log_dir: Path) -> Iterator[list[int]]:
    """Count the runs that are alive, again and again; gives the counts."""
    counts: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            counts.append(sum(is_held(RunFiles(run).lock) for run in log_dir.glob("*/runs/*")))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield counts
    finally:
        over.set()
        thread.join()


def most_at_once(workers: Callable[[], Sized], *campaigns: subprocess.Popen[str]) -> int:
    """Look at the workers that live until the campaigns have ended; gives the most."""
    most = 0
    while any(campaign.poll() is None for campaign in campaigns):
        most = max(most, len(workers()))
        time.sleep(0.1)  # looking takes time from those who are looked at
    return most


def goes_on_with_a_budget(retrain: Start, campaign: Path) -> None:
    """Resume until a budget of some more steps ends it, then with a larger one until the campaign ends."""
    before_usd = survey(campaign)[0].cost_usd or 0.0
    code, said = finish(retrain("resume", campaign, "--budget-usd", before_usd + 4))
    assert (code, "no room for another step" in said) == (EXIT_INTERRUPTED, True), said
    after_usd = survey(campaign)[0].cost_usd or 0.0
    assert before_usd < after_usd <= before_usd + 4 + 1  # the most that a step costs
    assert not any(is_held(RunFiles(run).lock) for run in campaign.glob("runs/*"))
    code, said = finish(retrain("resume", campaign, "--budget-usd", 1000))
    assert code == 0, said


def attempts_of(campaign: Path) -> list[int]:
    """Return how many attempts each run had."""
    return [len(read_attempts(RunFiles(run).attempts)) for run in campaign.glob("runs/*")]
