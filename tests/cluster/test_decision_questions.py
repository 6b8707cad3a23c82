"""Further questions of finished runs: the same results on Slurm and on Ray as on this machine."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

from retrain.base.errors import EXIT_DONE
from retrain.campaign.run import start
from tests.cluster.campaigns import Start, finish, only_campaign
from tests.cluster.ray_cluster import Cluster as RayCluster
from tests.cluster.slurm_cluster import Cluster as Slurm
from tests.cluster.test_decision import CLUSTERS, PARALLEL
from tests.cluster.waiting import await_that
from tests.long.test_decision_questions import FILE, records_of

RUNS = 12  # of the first round, which are asked again


def have_been_asked_again(logs: Path, runs: int) -> bool:
    begun = (path.read_text().count('"begin"') for path in logs.glob("*/runs/*/attempts.jsonl"))
    return sum(begun) >= RUNS + runs


def run_the_same(cluster: tuple[str, ...], retrain: Start, tmp_path: Path) -> None:
    """Check that a cluster gives the same records, with its orchestrator killed while it asks."""
    file, logs = tmp_path / "questions.toml", tmp_path / "logs"
    file.write_text(FILE + CLUSTERS)
    started = retrain("run", file, "--set", f"logging.log_dir={logs}", *cluster, *PARALLEL)
    await_that("two runs asked again", partial(have_been_asked_again, logs, 2))
    os.kill(started.pid, signal.SIGKILL)
    started.communicate()
    code, said = finish(retrain("resume", only_campaign(logs)))
    assert code == EXIT_DONE, said
    alone = start(file, [f"logging.log_dir={tmp_path / 'alone'}"]).execute().directory
    assert records_of(only_campaign(logs)) == records_of(alone)


def test_slurm_asks_the_same(slurm: Slurm, retrain: Start, tmp_path: Path) -> None:
    run_the_same(("--set", 'campaign.launcher="slurm"'), retrain, tmp_path)


def test_ray_asks_the_same(ray: RayCluster, retrain: Start, tmp_path: Path) -> None:
    at = f"campaign.ray.address={ray.address}"
    run_the_same(("--set", 'campaign.launcher="ray"', "--set", at), retrain, tmp_path)
