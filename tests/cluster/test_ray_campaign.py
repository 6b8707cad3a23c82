"""One campaign on a Ray that is harmed in every way, and on this machine alone: the same result."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from retrain.errors import EXIT_RUN_FAILED
from tests.cluster.campaigns import (
    BROKEN,
    CONDITIONS,
    TOML,
    Start,
    attempts_of,
    counting_runs,
    finish,
    numbers,
    only_campaign,
    results,
)
from tests.cluster.ray_cluster import HEAD, NODES, Cluster
from tests.cluster.waiting import await_that

WORKERS, STEPS = 3, 25  # a job of Ray takes seconds to start: with shorter runs few would meet
RAY_TOML = (
    TOML.replace("max_workers = 5", f"max_workers = {WORKERS}").replace(
        "max_steps = 12", f"max_steps = {STEPS}"
    )
) + "[campaign.ray]\npoll_seconds = 2\ncpus = 0.5\n"


def on(ray: Cluster) -> tuple[str, ...]:
    return ("--set", 'campaign.launcher="ray"', "--set", f"campaign.ray.address={ray.address}")


def test_a_harmed_cluster_gives_what_one_machine_gives(ray: Cluster, retrain: Start, tmp_path: Path) -> None:
    (tmp_path / "both.toml").write_text(RAY_TOML + CONDITIONS + BROKEN)
    local = retrain("run", "both.toml", "--set", "logging.log_dir=alone", "--set", "campaign.max_workers=3")
    assert finish(local)[0] == EXIT_RUN_FAILED

    with counting_runs(tmp_path / "logs") as counts:
        submitting = retrain("run", "both.toml", *on(ray))
        await_that("workers", lambda: len(ray.workers()) > 1)
        campaign = only_campaign(tmp_path / "logs")
        await_that("a checkpoint", lambda: any(campaign.glob("runs/*/checkpoints/step-*")))
        ray.kill(next(node for node in NODES if ray.workers(node)))
        await_that("workers on what is left", lambda: ray.workers())
        ray.kill(HEAD)
        submitting.send_signal(signal.SIGKILL)
        finish(submitting)
        ray.stop()  # without a head its nodes end too, sooner or later
        ray.start()
        code, said = finish(retrain("resume", campaign), 400)

    assert code == EXIT_RUN_FAILED, said
    assert 1 < max(counts) <= WORKERS
    on_ray, alone = results(campaign), results(only_campaign(tmp_path / "alone"))
    assert {run_id: state for run_id, (state, _) in on_ray.items()} == {
        f"{name}_s{seed}": "failed" if name == "broken" else "done"
        for name in [*(f"c{n}" for n in range(11)), "broken"]
        for seed in (0, 1)
    }
    assert on_ray == alone
    assert sum(attempts_of(campaign)) > len(on_ray)
    for run_id, (state, rows) in on_ray.items():
        assert state == "failed" or [row["step"] for row in rows] == list(range(1, STEPS + 1)), run_id


def test_a_campaign_goes_on_without_the_machine_that_submitted_it(
    ray: Cluster, retrain: Start, tmp_path: Path
) -> None:
    (tmp_path / "gone.toml").write_text(RAY_TOML + CONDITIONS)
    with counting_runs(tmp_path / "logs") as counts:
        submitting = retrain("run", "gone.toml", *on(ray))
        await_that("workers", lambda: ray.workers())
        submitting.send_signal(signal.SIGKILL)
        finish(submitting)
        campaign = only_campaign(tmp_path / "logs")
        await_that(
            "all runs without anybody", lambda: len(list(campaign.glob("runs/*/done.json"))) == 22, 240
        )
    code, said = finish(retrain("resume", campaign))
    assert code == 0, said
    assert max(counts) <= WORKERS
    assert set(attempts_of(campaign)) == {1}


def test_a_second_job_of_a_running_run_leaves_and_touches_nothing(
    ray: Cluster, retrain: Start, tmp_path: Path
) -> None:
    (tmp_path / "twice.toml").write_text(RAY_TOML)
    first = retrain(
        "run", "twice.toml", *on(ray), "--set", "campaign.seeds=[0]", "--set", "campaign.max_steps=60"
    )
    await_that("steps", lambda: any(tmp_path.glob("logs/*/runs/*/metrics.jsonl")))
    (run,) = tmp_path.glob("logs/*/runs/*")
    job = f"{run.parent.parent.name}.{run.name}.1"
    script = run.parent.parent / "ray" / "job.sh"
    assert not ray.client.submit(job, "true", {}), "Ray took the same id twice"
    ray.client.submit("unknown", f"bash {script} {run} {job}", {"entrypoint_num_cpus": 0.5})
    await_that("the twin's end", lambda: ray.client.job("unknown").is_over)
    assert ray.client.job("unknown").exit_code == 75
    assert "left alone" in (run / "output.log").read_text()
    assert finish(first)[0] == 0
    assert attempts_of(run.parent.parent) == [1]
    assert [row["step"] for row in numbers(run)] == list(range(1, 61))


def test_stop_saves_everything_from_another_machine_and_resume_goes_on(
    ray: Cluster, retrain: Start, tmp_path: Path
) -> None:
    (tmp_path / "halt.toml").write_text(RAY_TOML)
    submitting = retrain("run", "halt.toml", *on(ray), "--set", "campaign.max_workers=1")
    await_that("steps", lambda: any(tmp_path.glob("logs/*/runs/*/metrics.jsonl")))
    submitting.send_signal(signal.SIGKILL)
    finish(submitting)
    campaign = only_campaign(tmp_path / "logs")
    code, said = finish(retrain("stop", campaign))
    assert code == 0, said
    assert all(job.is_over for job in ray.client.jobs())
    assert any(campaign.glob("runs/*/checkpoints/step-*"))
    code, said = finish(retrain("resume", campaign))
    assert code == 0, said
    assert all(state == "done" for state, _ in results(campaign).values())


def test_status_needs_no_ray(ray: Cluster, retrain: Start, tmp_path: Path) -> None:
    (tmp_path / "seen.toml").write_text(RAY_TOML)
    assert finish(retrain("run", "seen.toml", *on(ray)))[0] == 0
    ray.kill(HEAD)
    shown = retrain("status", only_campaign(tmp_path / "logs"), "--json")
    out, _ = shown.communicate(timeout=60)
    assert {run["state"] for run in json.loads(out)[0]["runs"]} == {"done"}
