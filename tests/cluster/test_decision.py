"""A campaign that adds seeds until it is decided: the same verdicts on Slurm, on Ray and on this machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from retrain.errors import EXIT_DONE
from retrain.locks.held import is_held
from retrain.records.layout import CampaignFiles, RunFiles
from tests.cluster.campaigns import Start, finish, only_campaign
from tests.cluster.ray_cluster import Cluster as RayCluster
from tests.cluster.slurm_cluster import Cluster as Slurm
from tests.cluster.waiting import await_that
from tests.long.test_decision import DECISION, decision_of

TWO_CONDITIONS = DECISION.partition('[[campaign.conditions]]\nname = "alike"')[0]
PARALLEL = ("--set", "campaign.parallel=true", "--set", "campaign.max_workers=3")
ENGINES = """
[campaign.slurm]
poll_seconds = 2
flags = ["--cpus-per-task=1"]
[campaign.ray]
poll_seconds = 2
cpus = 0.5
"""


@pytest.fixture
def expected(retrain: Start, tmp_path: Path) -> object:
    """The verdicts on this machine."""
    (tmp_path / "decision.toml").write_text(TWO_CONDITIONS + ENGINES)
    code, said = finish(retrain("run", "decision.toml", "--set", "logging.log_dir=alone"))
    assert code == EXIT_DONE, said
    return decision_of(only_campaign(tmp_path / "alone"))


def decided_on(engine: tuple[str, ...], retrain: Start, tmp_path: Path) -> object:
    """Return the verdicts on an engine, of which the first orchestrator is killed in a later round."""
    started = retrain("run", "decision.toml", *engine)
    done = "logs/*/runs/*/done.json"
    await_that("seven runs end", lambda: len(list(tmp_path.glob(done))) >= 7, 300)
    os.kill(started.pid, signal.SIGKILL)
    started.communicate()
    directory = only_campaign(tmp_path / "logs")
    code, said = finish(retrain("resume", directory))
    assert code == EXIT_DONE, said
    assert not any(is_held(RunFiles(run).lock) for run in CampaignFiles(directory).runs.iterdir())
    return decision_of(directory)


def test_slurm_runs_the_rounds(slurm: Slurm, retrain: Start, tmp_path: Path, expected: object) -> None:
    engine = ("--set", 'campaign.launcher="slurm"', *PARALLEL)
    assert decided_on(engine, retrain, tmp_path) == expected


def test_ray_runs_the_rounds(ray: RayCluster, retrain: Start, tmp_path: Path, expected: object) -> None:
    engine = ("--set", 'campaign.launcher="ray"', "--set", f"campaign.ray.address={ray.address}", *PARALLEL)
    assert decided_on(engine, retrain, tmp_path) == expected
