"""Runs on several ranks in Slurm's jobs, which real kills interrupt: the rows of a machine with as many."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from retrain.base.errors import EXIT_RUN_FAILED
from retrain.records.metrics import read_metrics
from retrain.records.run_state import read_attempts
from tests.clocks import without_times
from tests.cluster.campaigns import Start, finish, has_steps, only_campaign
from tests.cluster.processes import kill
from tests.cluster.slurm_cluster import NODES, Cluster
from tests.cluster.waiting import await_that
from tests.plugins.pure import let_have

pytestmark = [pytest.mark.extras, pytest.mark.timeout(600)]  # a busy machine starts a rank in half a minute
RANK = "retrain.backends.local.rank_process"
MEASURED = ("memory_fraction", "step_memory")
# on all cores of both nodes
BY_PROGRAMS = """"custom"
params.path = "tests.plugins.pure.score"
params.timeout_s = 900
params.params"""
CAMPAIGN = """
[model]
model = "{model}"
lora_rank = 4
[backend]
backend = "local"
options = {{ local_files_only = true, device = "cpu", devices = 2 }}
[training]
batch_size = 3
group_size = 4
max_tokens = 4
lr = 1e-3
save_every = 1
[data]
task = "successor"
eval_prompts = 4
[reward]
reward = "tests.plugins.pure.score"
params = {{ logs = "logs", gate = "gate", wait_s = 0.02 }}  # so that all ranks score
[campaign]
seeds = [0]
max_steps = 4
[campaign.slurm]
poll_seconds = 2
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.extras.tiny_models import save_tiny_model  # not at the top: it imports torch

    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=32)


@pytest.fixture(scope="module")
def undisturbed(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of a run on two ranks of this machine, with layers in pieces."""
    from retrain.campaign.run import run_campaign

    directory = tmp_path_factory.mktemp("alone")
    text = CAMPAIGN.format(model=model).replace("devices = 2", "devices = 2, shard = true")
    (directory / "c.toml").write_text(text)
    settings = (f"logging.log_dir={directory / 'logs'}", "campaign.launcher=inline", "reward.params={}")
    outcome = run_campaign(directory / "c.toml", settings)
    (run,) = outcome.directory.glob("runs/*")
    return rows_of(run)


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if key not in MEASURED}
        for row in without_times(read_metrics(run))
    ]


def test_a_job_has_all_ranks_of_a_run_and_leaves_none(
    slurm: Cluster, retrain: Start, tmp_path: Path, model: str
) -> None:
    (tmp_path / "c.toml").write_text(CAMPAIGN.format(model=model))
    let_have(tmp_path / "gate", 1)
    campaign = retrain("run", "c.toml", "--set", "campaign.launcher=slurm", "--set", "campaign.retries=0")
    await_that("a step", lambda: has_steps(tmp_path))
    assert "CPUs/Task=2" in slurm.run("scontrol", "show", "job").stdout
    assert len(slurm.workers(program=RANK)) == 1
    kill(slurm.workers())
    await_that("the end of rank 1", lambda: not slurm.workers(program=RANK))
    assert finish(campaign)[0] == EXIT_RUN_FAILED


def test_a_node_that_vanishes_ends_the_attempt_and_the_run_goes_on_with_another(
    slurm: Cluster, retrain: Start, tmp_path: Path, model: str, undisturbed: list[dict[str, Any]]
) -> None:
    text = CAMPAIGN.format(model=model).replace("devices = 2", "nodes = 2, shard = true")
    text = text.replace('"tests.plugins.pure.score"\nparams', BY_PROGRAMS)
    (tmp_path / "c.toml").write_text(text)
    let_have(tmp_path / "gate", 1)  # so that the run does not end before a node does
    campaign = retrain("run", "c.toml", "--set", "campaign.launcher=slurm")
    await_that("a step", lambda: has_steps(tmp_path))
    (first,) = [node for node in NODES if slurm.workers(node)]
    (other,) = [node for node in NODES if slurm.workers(node, RANK) and node != first]
    slurm.kill_node(other)
    await_that("the end of rank 0", lambda: not slurm.workers(first))
    let_have(tmp_path / "gate", 1000)
    code, said = finish(campaign)
    assert code == 0, said
    (run,) = only_campaign(tmp_path / "logs").glob("runs/*")
    lost, _ = read_attempts(run / "attempts.jsonl")
    how = "rank 1, on another node, has ended or was lost with it|the ranks have lost each other"
    assert re.search(how, lost.message), lost.message
    assert rows_of(run) == undisturbed
    await_that("the end of all ranks and programs", lambda: not slurm.job_processes())
