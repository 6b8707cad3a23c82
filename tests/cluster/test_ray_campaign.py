"""A campaign on a Ray: stopped in every way, never doubled, within its budget."""

from __future__ import annotations

import signal
from pathlib import Path

from retrain.base.errors import EXIT_INTERRUPTED
from retrain.campaign.launchers.ray.client import RayJob
from tests.cluster.campaigns import (
    PRICED,
    TOML,
    Start,
    attempts_of,
    finish,
    goes_on_with_a_budget,
    has_steps,
    numbers,
    only_campaign,
    results,
    until,
)
from tests.cluster.ray_cluster import Cluster
from tests.cluster.waiting import await_that

WORKERS = 3
RAY_TOML = TOML.replace("max_workers = 5", f"max_workers = {WORKERS}") + (
    "[campaign.ray]\npoll_seconds = 2\ncpus = 0.5\n"
)


def on(ray: Cluster, *settings: str) -> list[str]:
    """Return the options that run a campaign there, with other settings."""
    return sets(*settings_for(ray, *settings))


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def settings_for(ray: Cluster, *settings: str) -> list[str]:
    return ['campaign.launcher="ray"', f"campaign.ray.address={ray.address}", *settings]


def drivers(ray: Cluster, campaign: Path) -> list[RayJob]:
    """Give a campaign's jobs in the order of their numbers."""
    mine = [job for job in ray.client.jobs() if job.id.startswith(f"{campaign.name}.")]
    return sorted(mine, key=lambda job: job.id)


def is_over(ray: Cluster, name: str) -> bool:
    found = ray.client.job(name)
    return found is not None and found.is_over


def test_runs_are_not_doubled_and_a_stop_of_the_job_or_the_campaign_saves_everything(
    ray: Cluster, retrain: Start, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    (tmp_path / "halt.toml").write_text(until(gate, RAY_TOML) + PRICED)
    settings = ("campaign.max_workers=1", "campaign.max_steps=100")
    first = retrain("run", "halt.toml", *on(ray, *settings))
    await_that("steps", lambda: has_steps(tmp_path))
    campaign = only_campaign(tmp_path / "logs")
    run = campaign / "runs" / "maxrl_s0"

    assert not ray.client.submit(f"{campaign.name}.1", "true", {}), "Ray took the same id twice"
    twin = f"bash {campaign / 'ray' / 'job.sh'} retrain.trainer.worker {run} >> {run / 'output.log'} 2>&1"
    ray.client.submit("unknown", twin, {"entrypoint_num_cpus": 0.5})
    await_that("the twin's end", lambda: is_over(ray, "unknown"))
    twin_job = ray.client.job("unknown")
    assert twin_job is not None
    assert "exit code 75" in twin_job.message
    assert "left alone" in (run / "output.log").read_text()

    ray.client.stop(f"{campaign.name}.1")  # by somebody; not submitted again until resumed
    assert finish(first)[0] == EXIT_INTERRUPTED
    assert sorted(attempts_of(campaign)) == [0, 1]

    resumed = retrain("resume", campaign)
    await_that("its next attempt", lambda: sorted(attempts_of(campaign)) == [0, 2])
    resumed.send_signal(signal.SIGKILL)
    finish(resumed)
    code, said = finish(retrain("stop", campaign))  # as from another machine
    assert code == 0, said
    assert not ray.workers()
    await_that("the driver's end", lambda: all(job.is_over for job in drivers(ray, campaign)))
    assert any(campaign.glob("runs/*/checkpoints/step-*"))

    gate.touch()
    goes_on_with_a_budget(retrain, campaign)
    assert {state for state, _ in results(campaign).values()} == {"done"}
    assert [row["step"] for row in numbers(run)] == list(range(1, 101))
