"""What a user is told when Slurm is not there, refuses, or falls silent; and that nothing is lost by it."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from retrain.base.errors import EXIT_INTERRUPTED, EXIT_LAUNCH, EXIT_RUN_FAILED, LaunchError
from retrain.base.locks import holder, is_held
from retrain.campaign.run import start
from tests.cluster.campaigns import Start, attempts_of, finish, most_at_once, only_campaign, results, until
from tests.cluster.slurm_cluster import Cluster
from tests.cluster.test_slurm_campaign import SLURM, SLURM_TOML
from tests.cluster.waiting import PATIENCE_S, await_that


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "campaign.toml"
    path.write_text(SLURM_TOML)
    return path


@pytest.fixture
def gate(file: Path) -> Path:
    """Let no run of the file end before this one is there."""
    path = file.with_name("gate")
    file.write_text(until(path, SLURM_TOML))
    return path


def in_the_background(retrain: Start, file: Path, *options: str) -> Path:
    assert finish(retrain("run", file, *SLURM, *options, "--detach"))[0] == 0
    return only_campaign(file.parent / "logs")


def option(text: str) -> tuple[str, str]:
    return "--set", f"campaign.slurm.{text}"


def test_what_slurm_refuses_is_said_before_anything_exists(slurm: Cluster, file: Path) -> None:
    wrong = {
        "partition=nope": "see [campaign.slurm].partition",
        "licence=unheard:1": "see [campaign.slurm].licence",
        "licence=tinker:9": "see [campaign.slurm].licence",
        "mem=900G": "see [campaign.slurm]",
        "time=soon": "Invalid --time",
        "gres=gpu:1": "Invalid generic resource",
        "flags=['--no-such-option']": "unrecognized option",
    }
    for setting, message in wrong.items():
        with pytest.raises(LaunchError, match=re.escape(message)):
            start(file, ['campaign.launcher="slurm"', f"campaign.slurm.{setting}"])
    assert not (file.parent / "logs").exists()


def test_a_controller_that_is_away_at_the_start_is_named(slurm: Cluster, retrain: Start, file: Path) -> None:
    slurm.kill_controller()
    code, said = finish(retrain("run", file, *SLURM))
    assert code == EXIT_LAUNCH, said
    assert "Slurm does not answer" in said
    assert not (file.parent / "logs").exists()


def test_a_campaign_whose_runs_finish_needs_no_controller_to_end_nor_status_one(
    slurm: Cluster, retrain: Start, file: Path, gate: Path
) -> None:
    directory = in_the_background(retrain, file)
    await_that("workers", lambda: len(slurm.workers()) == 2)
    slurm.kill_controller()
    await_that("the notice", lambda: "Slurm does not answer" in (directory / "campaign.log").read_text())
    gate.touch()
    await_that("the end", lambda: not is_held(directory / "campaign.lock"))
    shown, _ = retrain("status", directory, "--json").communicate(timeout=PATIENCE_S)
    assert {run["state"] for run in json.loads(shown)["campaigns"][0]["runs"]} == {"done"}


def test_a_stop_reaches_workers_while_the_controller_is_away(
    slurm: Cluster, retrain: Start, file: Path
) -> None:
    campaign = retrain("run", file, *SLURM, "--set", "campaign.max_steps=100000")  # none ends before the stop
    await_that("workers", lambda: len(slurm.workers()) == 2)
    campaign.send_signal(signal.SIGKILL)
    finish(campaign)
    slurm.kill_controller()
    directory = only_campaign(file.parent / "logs")
    code, said = finish(retrain("stop", directory))
    assert code == EXIT_LAUNCH, said
    assert "save and leave at their next step" in said
    await_that("the workers' end", lambda: not slurm.workers())
    assert "interrupted" in {state for state, _ in results(directory).values()}


def test_a_controller_that_forgets_the_queue_costs_no_run(slurm: Cluster, retrain: Start, file: Path) -> None:
    campaign = retrain("run", file, *SLURM, "--set", "campaign.max_workers=1")
    await_that("a worker", lambda: slurm.workers())
    slurm.kill_controller()
    slurm.start_controller("-c")
    code, said = finish(campaign)
    assert code == 0, said
    states = results(only_campaign(file.parent / "logs"))
    assert {state for state, _ in states.values()} == {"done"}


def test_a_python_that_nodes_do_not_have_is_found_in_the_logs(
    slurm: Cluster, retrain: Start, file: Path
) -> None:
    nowhere = (*option("python=/nowhere/python"), "--set", "campaign.retries=0")
    code, said = finish(retrain("run", file, *SLURM, *nowhere))
    assert code == EXIT_RUN_FAILED, said
    assert "before its worker wrote anything" in said
    shown = retrain("logs", only_campaign(file.parent / "logs"), "maxrl_s0")
    out, _ = shown.communicate(timeout=PATIENCE_S)
    assert "/nowhere/python" in out


def test_what_slurm_itself_said_of_a_task_is_in_the_logs(slurm: Cluster, retrain: Start, file: Path) -> None:
    campaign = retrain("run", file, *SLURM, "--set", "campaign.max_steps=100000")
    await_that("workers", lambda: len(slurm.workers()) == 2)
    slurm.run("scancel", "--user=root")
    assert finish(campaign)[0] == EXIT_INTERRUPTED
    shown = retrain("logs", only_campaign(file.parent / "logs"), "maxrl_s0")
    out, _ = shown.communicate(timeout=PATIENCE_S)
    assert "CANCELLED" in out


def test_runs_that_somebody_cancelled_are_not_submitted_again_until_resumed(
    slurm: Cluster, retrain: Start, file: Path, gate: Path
) -> None:
    campaign = retrain("run", file, *SLURM, "--set", "campaign.max_workers=1")
    await_that("a worker", lambda: slurm.workers())
    slurm.run("scancel", "--user=root")
    assert finish(campaign)[0] == EXIT_INTERRUPTED
    directory = only_campaign(file.parent / "logs")
    assert sum(attempts_of(directory)) <= 1
    gate.touch()
    assert finish(retrain("resume", directory))[0] == 0


def test_a_waiting_run_cancelled_alone_is_not_submitted_again_and_a_stop_of_a_copy_stops_nothing(
    slurm: Cluster, retrain: Start, file: Path, gate: Path
) -> None:
    three = ("--set", "campaign.max_workers=1", "--set", "campaign.seeds=[0,1,2]")
    campaign = retrain("run", file, *SLURM, *three)
    await_that("a worker", lambda: slurm.workers())
    directory = only_campaign(file.parent / "logs")
    _, last = sorted(slurm.run("squeue", "-h", "-r", "-t", "PENDING", "-o", "%i").stdout.split())
    slurm.run("scancel", last)
    slurm.run("cp", "-r", str(directory), str(file.parent))
    assert finish(retrain("stop", file.parent / directory.name))[0] == 0
    gate.touch()
    code, said = finish(campaign)
    assert code == EXIT_INTERRUPTED, said
    assert "was cancelled in Slurm before it started" in said
    assert sorted(attempts_of(directory)) == [0, 1, 1]
    assert sorted(state for state, _ in results(directory).values()) == ["done", "done", "pending"]


def test_runs_that_slurm_holds_back_are_named_and_stopped(slurm: Cluster, retrain: Start, file: Path) -> None:
    directory = in_the_background(retrain, file, *option("""flags=['--hold']"""))
    held = "Slurm holds 2 runs back: JobHeldUser"
    await_that("the notice", lambda: held in (directory / "campaign.log").read_text())
    assert finish(retrain("stop", directory))[0] == 0
    assert slurm.run("squeue", "-h").stdout == ""
    assert {state for state, _ in results(directory).values()} == {"pending"}


def test_a_renamed_campaign_is_found_and_sbatchs_variables_count_for_nothing(
    slurm: Cluster, retrain: Start, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "nowhere")
    directory = in_the_background(retrain, file, *option("""flags=['--hold']"""))
    await_that("the tasks", lambda: slurm.run("squeue", "-h").stdout)
    orchestrator = holder(directory / "campaign.lock")
    assert orchestrator is not None
    os.kill(orchestrator.pid, signal.SIGKILL)
    await_that("its end", lambda: not is_held(directory / "campaign.lock"))
    renamed = directory.rename(directory.with_name("a,b|c"))
    assert finish(retrain("stop", renamed))[0] == 0
    assert slurm.run("squeue", "-h").stdout == ""


def test_licences_cap_the_runs_of_all_campaigns(slurm: Cluster, retrain: Start, file: Path) -> None:
    two_each = option("licence=tinker:2")
    two_each = (*two_each, "--set", "campaign.max_steps=6")
    both = [retrain("run", file, *SLURM, *two_each, "--set", f"logging.log_dir=logs{n}") for n in (1, 2)]
    assert most_at_once(slurm.workers, *both) == 2
    assert [finish(campaign)[0] for campaign in both] == [0, 0]
