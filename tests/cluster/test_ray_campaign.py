"""One campaign on a Ray that is harmed in every way, and on this machine alone: the same result."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

from retrain.errors import EXIT_LAUNCH, EXIT_RUN_FAILED
from tests.cluster.campaigns import (
    BROKEN,
    CONDITIONS,
    STEPS,
    TOML,
    Start,
    attempts_of,
    counting_runs,
    finish,
    numbers,
    only_campaign,
    results,
)
from tests.cluster.ray_cluster import HEAD, Cluster
from tests.cluster.waiting import await_that

WORKERS = 3
RAY_TOML = TOML.replace("max_workers = 5", f"max_workers = {WORKERS}") + (
    "[campaign.ray]\npoll_seconds = 2\ncpus = 0.5\n"
)


def on(ray: Cluster) -> tuple[str, ...]:
    return ("--set", 'campaign.launcher="ray"', "--set", f"campaign.ray.address={ray.address}")


def states(status: subprocess.Popen[str]) -> set[str]:
    """Return the states that `retrain status` shows."""
    out, _ = status.communicate(timeout=60)
    return {run["state"] for run in json.loads(out)["campaigns"][0]["runs"]}


def test_a_harmed_cluster_gives_what_one_machine_gives(ray: Cluster, retrain: Start, tmp_path: Path) -> None:
    (tmp_path / "both.toml").write_text(RAY_TOML + CONDITIONS + BROKEN)
    local = retrain("run", "both.toml", "--set", "logging.log_dir=alone", "--set", "campaign.max_workers=3")
    assert finish(local)[0] == EXIT_RUN_FAILED

    with counting_runs(tmp_path / "logs") as counts:
        submitting = retrain("run", "both.toml", *on(ray))
        await_that("a checkpoint", lambda: any(tmp_path.glob("logs/*/runs/*/checkpoints/step-*")))
        campaign = only_campaign(tmp_path / "logs")
        ray.kill(next(node for node in ray.nodes if ray.workers(node)))
        await_that("Ray's word of it", lambda: any(campaign.glob("runs/*/engine-*.out")))
        await_that("workers on what is left", lambda: ray.workers())
        ray.kill(HEAD)
        submitting.send_signal(signal.SIGKILL)
        finish(submitting)
        assert "running" in states(retrain("status", campaign, "--json"))  # which needs no Ray
        code, said = finish(retrain("resume", campaign))
        assert (code, "no Ray cluster answers" in said) == (EXIT_LAUNCH, True)
        ray.start_head()  # knows neither jobs nor the node that lives; Ray ends that within a minute
        assert ray.workers(), "nothing lived through the head's restart"
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


def test_a_campaign_goes_on_without_the_machine_that_submitted_it_and_a_node(
    ray: Cluster, retrain: Start, tmp_path: Path
) -> None:
    table = "cpus = 2.5\nshare_seconds = 0\n"  # of four per node, so that Ray uses both nodes
    (tmp_path / "gone.toml").write_text(RAY_TOML.replace("cpus = 0.5\n", table))
    settings = ("campaign.seeds=[0,1,2]", "campaign.max_workers=2", "campaign.max_steps=60")
    longer = [word for setting in settings for word in ("--set", setting)]
    with counting_runs(tmp_path / "logs") as counts:
        submitting = retrain("run", "gone.toml", *on(ray), *longer)
        await_that("workers on both nodes", lambda: all(map(ray.workers, ray.nodes)))
        submitting.send_signal(signal.SIGKILL)
        finish(submitting)
        ray.kill(ray.nodes[0])
        campaign = only_campaign(tmp_path / "logs")
        await_that("all runs without anybody", lambda: len(list(campaign.glob("runs/*/done.json"))) == 3)
    code, said = finish(retrain("resume", campaign))
    assert code == 0, said
    assert max(counts) <= 2
    assert sorted(attempts_of(campaign))[:2] == [1, 1]
    names = sorted(job.id.removeprefix(f"{campaign.name}.") for job in ray.client.jobs())
    (again,) = [name for name in names if name.startswith("maxrl_s") and name.endswith(".2")]
    assert set(names) >= {again, *(f"maxrl_s{seed}.1" for seed in range(3))}


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
