"""Campaigns that add seeds, or search: the same results on Slurm, on Ray and on this machine."""

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
from tests.long.test_decision import DECISION, decision_of
from tests.long.test_search import SEARCH, found_of

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


def on_this_machine(file: Path, retrain: Start) -> Path:
    """Run a campaign on this machine, and return its directory."""
    logs = file.with_name(f"{file.stem}-alone")
    code, said = finish(retrain("run", file, "--set", f"logging.log_dir={logs}"))
    assert code == EXIT_DONE, said
    return only_campaign(logs)


def killed_on(engine: tuple[str, ...], file: Path, has_begun: str, retrain: Start) -> Path:
    """Run it on an engine, and return its directory.

    Its first orchestrator is killed when seven runs have a file, which is in a later round.
    """
    logs = file.with_suffix("")
    started = retrain("run", file, "--set", f"logging.log_dir={logs}", *engine)
    await_that("a later round", lambda: len(list(logs.glob(f"*/runs/*/{has_begun}"))) >= 7)
    os.kill(started.pid, signal.SIGKILL)
    started.communicate()
    directory = only_campaign(logs)
    code, said = finish(retrain("resume", directory))
    assert code == EXIT_DONE, said
    assert not any(is_held(RunFiles(run).lock) for run in CampaignFiles(directory).runs.iterdir())
    return directory


def run_the_same(engine: tuple[str, ...], retrain: Start, tmp_path: Path) -> None:
    """Check that an engine comes to the same verdicts, and the same winner of a search, as this machine."""
    for name, text, found, has_begun in (
        ("decision", TWO_CONDITIONS, decision_of, "done.json"),
        ("search", SEARCH.replace("rungs = [2, 4]", "rungs = [2]"), found_of, "checkpoints/*-000002"),
    ):
        file = tmp_path / f"{name}.toml"
        file.write_text(text + ENGINES)
        expected = found(on_this_machine(file, retrain))
        assert found(killed_on(engine, file, has_begun, retrain)) == expected


def test_slurm_runs_the_rounds(slurm: Slurm, retrain: Start, tmp_path: Path) -> None:
    run_the_same(("--set", 'campaign.launcher="slurm"', *PARALLEL), retrain, tmp_path)


def test_ray_runs_the_rounds(ray: RayCluster, retrain: Start, tmp_path: Path) -> None:
    at = f"campaign.ray.address={ray.address}"
    run_the_same(("--set", 'campaign.launcher="ray"', "--set", at, *PARALLEL), retrain, tmp_path)
