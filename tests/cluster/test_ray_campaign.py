"""One campaign on a Ray that is harmed in every way, and on this machine alone: the same result."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import psutil

from retrain.errors import EXIT_LAUNCH, EXIT_RUN_FAILED
from retrain.launchers.ray.client import RayJob
from retrain.launchers.ray.home import Home, TaskEvent
from retrain.locks.held import is_held
from tests.cluster.campaigns import (
    BROKEN,
    CONDITIONS,
    NAMES,
    STEPS,
    TOML,
    Start,
    attempts_of,
    counting_runs,
    finish,
    has_steps,
    numbers,
    only_campaign,
    results,
)
from tests.cluster.ray_cluster import HEAD, Cluster
from tests.cluster.waiting import PATIENCE_S, await_that

WORKERS = 3
RAY_TOML = TOML.replace("max_workers = 5", f"max_workers = {WORKERS}") + (
    "[campaign.ray]\npoll_seconds = 2\ncpus = 0.5\n"
)


def on(ray: Cluster) -> tuple[str, ...]:
    return ("--set", 'campaign.launcher="ray"', "--set", f"campaign.ray.address={ray.address}")


def states(status: subprocess.Popen[str]) -> set[str]:
    """Return the states that `retrain status` shows."""
    out, _ = status.communicate(timeout=PATIENCE_S)
    return {run["state"] for run in json.loads(out)["campaigns"][0]["runs"]}


def drivers(ray: Cluster, campaign: Path) -> list[RayJob]:
    """Give a campaign's jobs in the order of their numbers."""
    mine = [job for job in ray.client.jobs() if job.id.startswith(f"{campaign.name}.")]
    return sorted(mine, key=lambda job: job.id)


def events(campaign: Path) -> list[TaskEvent]:
    """Give what the driver wrote last of each run."""
    home = Home(campaign)
    home.read_events()
    return list(home.last.values())


def is_over(ray: Cluster, name: str) -> bool:
    found = ray.client.job(name)
    return found is not None and found.is_over


def kill_driver(ray: Cluster) -> None:
    """End the one driver that lives, as the kernel does for want of memory."""
    (driver,) = [process for process in ray.processes(HEAD) if is_driver(process)]
    driver.kill()


def is_driver(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[3:5] == ["retrain.hidden", "retrain.launchers.ray.driver"]
    except psutil.NoSuchProcess:  # it ended meanwhile
        return False


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
        await_that("a run on what is left", lambda: any(map(is_held, campaign.glob("runs/*/run.lock"))))
        ray.kill(HEAD)
        submitting.send_signal(signal.SIGKILL)
        finish(submitting)
        assert "running" in states(retrain("status", campaign, "--json"))  # which needs no Ray
        code, said = finish(retrain("resume", campaign))
        assert (code, "no Ray cluster answers" in said) == (EXIT_LAUNCH, True)
        ray.start_head()  # knows neither jobs nor the node that lives; Ray ends that within a minute
        ray.start()
        code, said = finish(retrain("resume", campaign))

    assert code == EXIT_RUN_FAILED, said
    assert 1 < max(counts) <= WORKERS
    on_ray, alone = results(campaign), results(only_campaign(tmp_path / "alone"))
    assert {run_id: state for run_id, (state, _) in on_ray.items()} == {
        f"{name}_s{seed}": "failed" if name == "broken" else "done"
        for name in [*NAMES, "broken"]
        for seed in (0, 1)
    }
    assert on_ray == alone
    assert sum(attempts_of(campaign)) > len(on_ray)
    for run_id, (state, rows) in on_ray.items():
        assert state == "failed" or [row["step"] for row in rows] == list(range(1, STEPS + 1)), run_id


def test_a_campaign_goes_on_without_the_machine_that_submitted_it_and_a_node(
    ray: Cluster, retrain: Start, tmp_path: Path
) -> None:
    table = "cpus = 2.5\n"  # of four per node, so that Ray uses both nodes
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
    (lost,) = [event for event in events(campaign) if event.life == 2]
    assert (campaign / "runs" / lost.run_id).is_dir()
    assert [job.id for job in drivers(ray, campaign)] == [f"{campaign.name}.1"]


def test_a_driver_that_is_lost_leaves_no_workers_and_is_replaced(
    ray: Cluster, retrain: Start, tmp_path: Path
) -> None:
    (tmp_path / "lost.toml").write_text(RAY_TOML)
    settings = ("campaign.seeds=[0,1]", "campaign.max_workers=2", "campaign.max_steps=60")
    longer = [word for setting in settings for word in ("--set", setting)]
    with counting_runs(tmp_path / "logs") as counts:
        submitting = retrain("run", "lost.toml", *on(ray), *longer)
        await_that("workers", lambda: len(ray.workers()) == 2)
        kill_driver(ray)
        campaign = only_campaign(tmp_path / "logs")
        await_that("another one", lambda: len(drivers(ray, campaign)) == 2)
        await_that("another submission", lambda: all(event.number > 1 for event in events(campaign)))
        await_that("workers again", lambda: len(ray.workers()) == 2)
        submitting.send_signal(signal.SIGKILL)
        finish(submitting)
        kill_driver(ray)
        await_that("no workers", lambda: not ray.workers())
        code, said = finish(retrain("resume", campaign))
    assert code == 0, said
    assert max(counts) <= 2
    assert len(drivers(ray, campaign)) == 3
    assert all(state == "done" for state, _ in results(campaign).values())


def test_a_second_job_of_a_running_run_leaves_and_touches_nothing(
    ray: Cluster, retrain: Start, tmp_path: Path
) -> None:
    (tmp_path / "twice.toml").write_text(RAY_TOML)
    first = retrain(
        "run", "twice.toml", *on(ray), "--set", "campaign.seeds=[0]", "--set", "campaign.max_steps=60"
    )
    await_that("steps", lambda: has_steps(tmp_path))
    (run,) = tmp_path.glob("logs/*/runs/*")
    campaign = run.parent.parent
    assert not ray.client.submit(f"{campaign.name}.1", "true", {}), "Ray took the same id twice"
    twin = f"bash {campaign / 'ray' / 'job.sh'} retrain.worker {run} >> {run / 'output.log'} 2>&1"
    ray.client.submit("unknown", twin, {"entrypoint_num_cpus": 0.5})
    await_that("the twin's end", lambda: is_over(ray, "unknown"))
    twin_job = ray.client.job("unknown")
    assert twin_job is not None
    assert twin_job.exit_code == 75
    assert "left alone" in (run / "output.log").read_text()
    assert finish(first)[0] == 0
    assert attempts_of(campaign) == [1]
    assert [row["step"] for row in numbers(run)] == list(range(1, 61))


def test_stop_saves_everything_from_another_machine_and_resume_goes_on(
    ray: Cluster, retrain: Start, tmp_path: Path
) -> None:
    (tmp_path / "halt.toml").write_text(RAY_TOML)
    submitting = retrain("run", "halt.toml", *on(ray), "--set", "campaign.max_workers=1")
    await_that("steps", lambda: has_steps(tmp_path))
    submitting.send_signal(signal.SIGKILL)
    finish(submitting)
    campaign = only_campaign(tmp_path / "logs")
    code, said = finish(retrain("stop", campaign))
    assert code == 0, said
    assert not ray.workers()
    await_that("the driver's end", lambda: all(job.is_over for job in drivers(ray, campaign)))
    assert any(campaign.glob("runs/*/checkpoints/step-*"))
    code, said = finish(retrain("resume", campaign))
    assert code == 0, said
    assert all(state == "done" for state, _ in results(campaign).values())
