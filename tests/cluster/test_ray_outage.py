"""Campaigns on a Ray whose nodes, head and drivers are killed, and on this machine: the same result."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

from retrain.base.errors import EXIT_LAUNCH, EXIT_RUN_FAILED
from retrain.base.locks import is_held
from retrain.campaign.launchers.ray.home import GIVEN, Home, TaskEvent
from retrain.records.layout import RunFiles
from retrain.records.run_state import read_attempts, worker_pids
from tests.cluster.campaigns import (
    BROKEN,
    CONDITIONS,
    NAMES,
    STEPS,
    Start,
    attempts_of,
    counting_runs,
    finish,
    has_steps,
    only_campaign,
    results,
    until,
)
from tests.cluster.processes import command_of, kill
from tests.cluster.ray_cluster import HEAD, Cluster
from tests.cluster.test_ray_campaign import RAY_TOML, WORKERS, drivers, on, sets
from tests.cluster.waiting import PATIENCE_S, await_that


def states(status: subprocess.Popen[str]) -> set[str]:
    """Return the states that `retrain status` shows."""
    out, _ = status.communicate(timeout=PATIENCE_S)
    return {run["state"] for run in json.loads(out)["campaigns"][0]["runs"]}


def events(campaign: Path) -> list[TaskEvent]:
    """Give what the driver wrote last of each run."""
    home = Home(campaign)
    home.read_events()
    return list(home.last.values())


def given_by(driver: int, campaign: Path) -> list[TaskEvent]:
    return [event for event in events(campaign) if (event.driver, event.what) == (driver, GIVEN)]


def kill_driver(ray: Cluster) -> None:
    """End the one driver that lives, as the kernel does for want of memory."""
    driver = ["retrain.base.hide_process", "retrain.campaign.launchers.ray.driver"]
    kill(pid for pid in ray.processes(HEAD, program=driver[1]) if command_of(pid)[3:5] == driver)


def test_a_harmed_cluster_gives_what_one_machine_gives_and_one_that_is_away_is_waited_for(
    ray: Cluster, retrain: Start, tmp_path: Path
) -> None:
    gate = tmp_path / "no-outage"  # no run ends before
    (tmp_path / "both.toml").write_text(until(gate, RAY_TOML) + CONDITIONS + BROKEN)
    local = ('campaign.launcher="inline"', "campaign.seeds=[0]", "logging.log_dir=alone")
    here = retrain("run", "both.toml", *sets(*local))
    patient = Patient(ray, retrain, tmp_path)

    with counting_runs(tmp_path / "logs") as counts:
        submitting = retrain("run", "both.toml", *on(ray, "campaign.seeds=[0]"))
        await_that("a checkpoint", lambda: any(tmp_path.glob("logs/*/runs/*/checkpoints/step-*")))
        campaign = only_campaign(tmp_path / "logs")
        saved = str(next(campaign.glob("runs/*/checkpoints/step-*")).parent.parent)
        ray.kill(next(node for node in ray.nodes if ray.processes(node, program=saved)))
        await_that("Ray's word of it", lambda: any(tmp_path.glob("*/*/runs/*/engine-*.out")))
        await_that("its runs on what is left", patient.runs)
        ray.kill(HEAD)
        submitting.send_signal(signal.SIGKILL)
        finish(submitting)
        assert "running" in states(retrain("status", patient.campaign, "--json"))  # which needs no Ray
        code, said = finish(retrain("resume", campaign))
        assert (code, "no Ray cluster answers" in said) == (EXIT_LAUNCH, True)
        patient.await_notice("no Ray cluster answers")
        ray.start_head()  # knows neither jobs nor the node that lives; Ray ends that within a minute
        ray.start(nodes=1)
        gate.touch()
        code, said = finish(retrain("resume", campaign))

    assert code == EXIT_RUN_FAILED, said
    assert finish(here)[0] == EXIT_RUN_FAILED
    assert 1 < max(counts) <= WORKERS
    on_ray, alone = results(campaign), results(only_campaign(tmp_path / "alone"))
    assert {run_id: state for run_id, (state, _) in on_ray.items()} == {
        f"{name}_s0": "failed" if name == "broken" else "done" for name in [*NAMES, "broken"]
    }
    assert on_ray == alone
    assert sum(attempts_of(campaign)) > len(on_ray)
    for run_id, (state, rows) in on_ray.items():
        assert state == "failed" or [row["step"] for row in rows] == list(range(1, STEPS + 1)), run_id
    patient.await_notice("Ray answers again")
    patient.finish()


class Patient:
    """A campaign in the background, whose runs do not end before it is told to finish."""

    def __init__(self, ray: Cluster, retrain: Start, directory: Path) -> None:
        self._gate = directory / "gate"
        (directory / "patient.toml").write_text(until(self._gate, RAY_TOML))
        settings = ("logging.log_dir=patient", "campaign.max_steps=150", "campaign.retries=10")
        assert finish(retrain("run", "patient.toml", *on(ray, *settings), "--detach"))[0] == 0
        self.campaign = only_campaign(directory / "patient")
        await_that("its steps", lambda: has_steps(self.campaign))

    def runs(self) -> bool:
        """Whether a run of it is alive, and has begun: before, its worker does not outlive its driver."""
        alive = worker_pids(self.campaign / "runs")
        runs = map(RunFiles, self.campaign.glob("runs/*"))
        return any(attempt.pid in alive for run in runs for attempt in read_attempts(run.attempts))

    def await_notice(self, words: str) -> None:
        await_that(words, lambda: words in (self.campaign / "campaign.log").read_text())

    def finish(self) -> None:
        self._gate.touch()
        await_that("the end", lambda: not is_held(self.campaign / "campaign.lock"))
        assert {state for state, _ in results(self.campaign).values()} == {"done"}


def test_a_campaign_outlives_its_drivers_the_machine_that_submitted_it_and_a_node(
    ray: Cluster, retrain: Start, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    table = "cpus = 2.5\n"  # of four per node, so that Ray uses both nodes
    (tmp_path / "lost.toml").write_text(until(gate, RAY_TOML).replace("cpus = 0.5\n", table))
    settings = ("campaign.seeds=[0,1,2]", "campaign.max_workers=2", "campaign.max_steps=100")
    with counting_runs(tmp_path / "logs") as counts:
        submitting = retrain("run", "lost.toml", *on(ray, *settings))
        await_that("workers", lambda: len(ray.workers()) == 2)
        kill_driver(ray)
        campaign = only_campaign(tmp_path / "logs")
        await_that("another one", lambda: len(drivers(ray, campaign)) == 2)
        await_that("its tasks", lambda: len(given_by(2, campaign)) == 2)
        await_that("workers again", lambda: len(ray.workers()) == 2)
        submitting.send_signal(signal.SIGKILL)
        finish(submitting)
        kill_driver(ray)
        await_that("no workers", lambda: not ray.workers())

        submitting = retrain("resume", campaign)
        await_that("workers on both nodes", lambda: all(map(ray.workers, ray.nodes)))
        submitting.send_signal(signal.SIGKILL)
        finish(submitting)
        ray.kill(ray.nodes[0])
        gate.touch()
        await_that("all runs without anybody", lambda: len(list(campaign.glob("runs/*/done.json"))) == 3)
    code, said = finish(retrain("resume", campaign))
    assert code == 0, said
    assert max(counts) <= 2
    (lost,) = [event for event in events(campaign) if event.life == 2]
    assert (campaign / "runs" / lost.run_id).is_dir()
    assert len(drivers(ray, campaign)) == 3
    assert all(state == "done" for state, _ in results(campaign).values())
