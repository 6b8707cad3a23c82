"""One campaign on a Slurm that is harmed in every way, and on this machine alone: the same result."""

from __future__ import annotations

import signal
from pathlib import Path

from retrain.base.errors import EXIT_RUN_FAILED
from retrain.records.layout import RunFiles
from retrain.records.run_state import read_attempts
from tests.cluster.campaigns import (
    BROKEN,
    CONDITIONS,
    NAMES,
    PRICED,
    STEPS,
    TOML,
    WORKERS,
    Start,
    attempts_of,
    counting_runs,
    finish,
    goes_on_with_a_budget,
    has_steps,
    numbers,
    only_campaign,
    results,
    until,
)
from tests.cluster.slurm_cluster import Cluster
from tests.cluster.waiting import await_that

SLURM = ("--set", 'campaign.launcher="slurm"')
LONG = 240  # steps: more than fit before Slurm's signal, which comes 5 to 35 s after the start
SLURM_TOML = TOML + '[campaign.slurm]\npoll_seconds = 2\nflags = ["--cpus-per-task=1"]\n'


def test_a_harmed_cluster_gives_what_one_machine_gives(
    slurm: Cluster, retrain: Start, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"  # no run ends before what it is to survive
    text = SLURM_TOML.replace("--cpus-per-task=1", "--cpus-per-task=3")  # of eight per node: two workers
    (tmp_path / "both.toml").write_text(until(gate, text) + CONDITIONS + BROKEN)
    inline = ("--set", 'campaign.launcher="inline"')
    local = retrain("run", "both.toml", *inline, "--set", "logging.log_dir=alone")
    with counting_runs(tmp_path / "logs") as counts:
        submitting = retrain("run", "both.toml", *SLURM)
        await_that("workers on three nodes", lambda: counts[-1:] == [WORKERS])
        campaign = only_campaign(tmp_path / "logs")
        await_that("a checkpoint", lambda: any(campaign.glob("runs/*/checkpoints/step-*")))
        assert slurm.kill_node(busy_node(slurm)), "nothing ran there"
        slurm.kill_controller()
        submitting.send_signal(signal.SIGKILL)
        finish(submitting)
        before = len(counts)
        await_that("workers without Slurm's controller or ours", lambda: any(counts[before:]))
        slurm.start_controller()
        gate.touch()
        code, said = finish(retrain("resume", campaign))

    assert code == EXIT_RUN_FAILED, said
    assert finish(local)[0] == EXIT_RUN_FAILED
    assert max(counts) == WORKERS
    on_slurm, alone = results(campaign), results(only_campaign(tmp_path / "alone"))
    assert {run_id: state for run_id, (state, _) in on_slurm.items()} == {
        f"{name}_s{seed}": "failed" if name == "broken" else "done"
        for name in [*NAMES, "broken"]
        for seed in (0, 1)
    }
    assert on_slurm == alone
    assert sum(attempts_of(campaign)) > len(on_slurm)
    for run_id, (state, rows) in on_slurm.items():
        assert state == "failed" or [row["step"] for row in rows] == list(range(1, STEPS + 1)), run_id


def states(slurm: Cluster, job: str) -> str:
    return slurm.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").stdout


def busy_node(slurm: Cluster) -> str:
    """Name a node that runs a worker."""
    return next(node for node in ("n1", "n2", "n3", "n4") if slurm.workers(node))


def test_a_campaign_goes_on_without_the_machine_that_submitted_it(
    slurm: Cluster, retrain: Start, tmp_path: Path
) -> None:
    (tmp_path / "gone.toml").write_text(SLURM_TOML.replace("[0, 1]", "[0, 1, 2]"))
    submitting = retrain("run", "gone.toml", *SLURM, "--set", "campaign.max_workers=2")
    await_that("workers", lambda: len(slurm.workers()) == 2)
    submitting.send_signal(signal.SIGKILL)
    finish(submitting)
    campaign = only_campaign(tmp_path / "logs")
    await_that("all runs without anybody", lambda: len(list(campaign.glob("runs/*/done.json"))) == 3)
    code, said = finish(retrain("resume", campaign))
    assert code == 0, said
    assert set(attempts_of(campaign)) == {1}


def test_a_second_task_of_a_running_run_leaves_and_touches_nothing(
    slurm: Cluster, retrain: Start, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    (tmp_path / "twice.toml").write_text(until(gate, SLURM_TOML))
    first = retrain("run", "twice.toml", *SLURM, "--set", "campaign.seeds=[0]")
    await_that("steps", lambda: has_steps(tmp_path))
    (run,) = tmp_path.glob("logs/*/runs/*")
    script = run.parent.parent / "slurm" / "job.sh"
    twin = slurm.run("sbatch", "--parsable", "--array=0", "-o/dev/null", str(script), "0").stdout.strip()
    await_that("the twin's end", lambda: "FAILED" in states(slurm, twin))
    assert "left alone" in (run / "output.log").read_text()
    assert "75:0" in slurm.run("scontrol", "show", "job", f"{twin}_0").stdout
    gate.touch()
    assert finish(first)[0] == 0
    assert len(read_attempts(RunFiles(run).attempts)) == 1
    assert [row["step"] for row in numbers(run)] == list(range(1, STEPS + 1))


def test_stop_saves_everything_from_another_machine_and_resume_goes_on(
    slurm: Cluster, retrain: Start, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    (tmp_path / "halt.toml").write_text(until(gate, SLURM_TOML) + PRICED)
    submitting = retrain("run", "halt.toml", *SLURM, "--set", "campaign.max_workers=1")
    await_that("steps", lambda: has_steps(tmp_path))
    submitting.send_signal(signal.SIGKILL)
    finish(submitting)
    campaign = only_campaign(tmp_path / "logs")
    code, said = finish(retrain("stop", campaign))
    assert code == 0, said
    assert slurm.run("squeue", "-h").stdout == ""
    assert any(campaign.glob("runs/*/checkpoints/step-*"))
    gate.touch()
    goes_on_with_a_budget(retrain, campaign)
    assert all(state == "done" for state, _ in results(campaign).values())


def test_a_run_that_is_longer_than_its_time_limit_goes_on_in_new_jobs(
    slurm: Cluster, retrain: Start, tmp_path: Path
) -> None:
    text = SLURM_TOML.replace(f"max_steps = {STEPS}", f"max_steps = {LONG}").replace(
        "seeds = [0, 1]", "seeds = [0]"
    )
    text = text.replace('["--cpus-per-task=1"]', '["--signal=B:TERM@25"]\ntime = "1"')
    (tmp_path / "long.toml").write_text(text.replace("save_every = 3", "save_every = 0"))
    code, said = finish(retrain("run", "long.toml", *SLURM, "--set", "campaign.retries=0"))
    assert code == 0, said
    (run,) = only_campaign(tmp_path / "logs").glob("runs/*")
    attempts = read_attempts(RunFiles(run).attempts)
    assert len(attempts) > 1
    assert [attempt.ending for attempt in attempts] == ["interrupted"] * (len(attempts) - 1) + ["done"]
    assert [row["step"] for row in numbers(run)] == list(range(1, LONG + 1))
