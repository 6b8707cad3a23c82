"""A search that then adds seeds to decide: the same results on Slurm, on Ray and on this machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from retrain.errors import EXIT_DONE
from retrain.locks.held import is_held
from retrain.records.layout import CampaignFiles, RunFiles
from tests.cluster.campaigns import Start, finish, only_campaign
from tests.cluster.ray_cluster import Cluster as RayCluster
from tests.cluster.slurm_cluster import Cluster as Slurm
from tests.cluster.waiting import await_that
from tests.long.test_search import SEARCH, found_of

FEW = {
    "[0.0, 0.1, 0.2, 0.3, 0.5]": "[0.0, 0.2, 0.5]",
    "rungs = [2, 4]": "rungs = [2]",
    "seeds = 6": "seeds = 4",
}
PARALLEL = ("--set", "campaign.parallel=true", "--set", "campaign.max_workers=3")
ENGINES = """
[campaign.slurm]
poll_seconds = 2
flags = ["--cpus-per-task=1"]
[campaign.ray]
poll_seconds = 2
cpus = 0.5
"""


def text() -> str:
    """Return a search of six runs, whose decision adds seeds for its winner and its reference."""
    found = SEARCH
    for given, fewer in FEW.items():
        assert given in found
        found = found.replace(given, fewer)
    return found + ENGINES


def killed_on(engine: tuple[str, ...], file: Path, retrain: Start) -> Path:
    """Run it on an engine, and return its directory.

    Its first orchestrator is killed when seven runs have begun: six are in the first round.
    """
    logs = file.with_suffix("")
    started = retrain("run", file, "--set", f"logging.log_dir={logs}", *engine, *PARALLEL)
    await_that("a later round", lambda: len(list(logs.glob("*/runs/*/metrics.jsonl"))) >= 7)
    os.kill(started.pid, signal.SIGKILL)
    started.communicate()
    directory = only_campaign(logs)
    code, said = finish(retrain("resume", directory))
    assert code == EXIT_DONE, said
    assert not any(is_held(RunFiles(run).lock) for run in CampaignFiles(directory).runs.iterdir())
    return directory


def run_the_same(engine: tuple[str, ...], retrain: Start, tmp_path: Path) -> None:
    """Check that an engine comes to the same winner, and the same verdict on it, as this machine."""
    file, logs = tmp_path / "search.toml", tmp_path / "alone"
    file.write_text(text())
    alone = retrain("run", file, "--set", f"logging.log_dir={logs}")
    there = found_of(killed_on(engine, file, retrain))
    code, said = finish(alone)
    assert code == EXIT_DONE, said
    assert there == found_of(only_campaign(logs))


def test_slurm_runs_the_rounds(slurm: Slurm, retrain: Start, tmp_path: Path) -> None:
    run_the_same(("--set", 'campaign.launcher="slurm"'), retrain, tmp_path)


def test_ray_runs_the_rounds(ray: RayCluster, retrain: Start, tmp_path: Path) -> None:
    at = f"campaign.ray.address={ray.address}"
    run_the_same(("--set", 'campaign.launcher="ray"', "--set", at), retrain, tmp_path)
