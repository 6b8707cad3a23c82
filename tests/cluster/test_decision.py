"""A search by Optuna that then adds seeds: the same results on Slurm, on Ray and on this machine."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

from retrain.base.errors import EXIT_DONE
from retrain.base.locks import is_held
from retrain.records.layout import CampaignFiles, RunFiles
from tests.cluster.campaigns import Start, finish, only_campaign
from tests.cluster.ray_cluster import Cluster as RayCluster
from tests.cluster.slurm_cluster import Cluster as Slurm
from tests.cluster.waiting import await_that
from tests.extras.test_optuna import CAMPAIGN, found_in

FEW = {
    "\ntrials = 5": "\ntrials = 2",
    "trials_per_round = 2": "trials_per_round = 1",
    "keep = 0.4": "keep = 0.7",
    "max_seeds = 6": "max_seeds = 4\nerror = 0.2",  # at 0.05, four seeds tell nothing apart
}
PARALLEL = ("--set", "campaign.parallel=true", "--set", "campaign.max_workers=3")
CLUSTERS = """
[campaign.slurm]
poll_seconds = 2
flags = ["--cpus-per-task=1"]
[campaign.ray]
poll_seconds = 2
cpus = 0.5
"""


def text() -> str:
    """Return a search of six runs, two of which follow from the others; then seeds are added to decide."""
    found = CAMPAIGN
    for given, fewer in FEW.items():
        assert given in found
        found = found.replace(given, fewer)
    return found + CLUSTERS


def have_begun(logs: Path, runs: int) -> bool:
    return len(list(logs.glob("*/runs/*/metrics.jsonl"))) >= runs


def killed_on(cluster: tuple[str, ...], file: Path, retrain: Start) -> Path:
    """Run it on a cluster, and return its directory.

    Its orchestrator is killed before the sampler's last proposal, which two further runs follow, and, once
    it is resumed, in the rounds of seeds, which begin with the seventh run.
    """
    logs = file.with_suffix("")
    command: tuple[object, ...] = "run", file, "--set", f"logging.log_dir={logs}", *cluster, *PARALLEL
    for begun in (4, 7):
        started = retrain(*command)
        await_that(f"{begun} runs", partial(have_begun, logs, begun))
        os.kill(started.pid, signal.SIGKILL)
        started.communicate()
        directory = only_campaign(logs)
        command = "resume", directory
    code, said = finish(retrain(*command))
    assert code == EXIT_DONE, said
    assert not any(is_held(RunFiles(run).lock) for run in CampaignFiles(directory).runs.iterdir())
    return directory


def run_the_same(cluster: tuple[str, ...], retrain: Start, tmp_path: Path) -> None:
    """Check that a cluster comes to the same proposals, winner and verdict on it as this machine."""
    file, logs = tmp_path / "search.toml", tmp_path / "alone"
    file.write_text(text())
    inline = ("--set", 'campaign.launcher="inline"')  # its runs need no processes
    alone = retrain("run", file, "--set", f"logging.log_dir={logs}", *inline)
    there = found_in(killed_on(cluster, file, retrain))
    code, said = finish(alone)
    assert code == EXIT_DONE, said
    expected = found_in(only_campaign(logs))
    assert there == expected
    assert [one.verdict for one in expected[2].conditions] == ["better"]


def test_slurm_runs_the_rounds(slurm: Slurm, retrain: Start, tmp_path: Path) -> None:
    run_the_same(("--set", 'campaign.launcher="slurm"'), retrain, tmp_path)


def test_ray_runs_the_rounds(ray: RayCluster, retrain: Start, tmp_path: Path) -> None:
    at = f"campaign.ray.address={ray.address}"
    run_the_same(("--set", 'campaign.launcher="ray"', "--set", at), retrain, tmp_path)
