"""`retrain wait` returns with a campaign's exit code, or earlier with what needs attention."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from retrain.base.errors import LaunchError
from retrain.base.locks import holder
from retrain.campaign.launchers import Assignment
from retrain.campaign.run import run_campaign, start
from retrain.campaign.stop import stop_campaign
from retrain.records.attention import AttentionWatch
from retrain.records.metrics import read_metrics
from retrain.records.run_row import RunRow
from retrain.records.run_state import API_PAUSED
from retrain.results.status import waiting
from retrain.results.status.waiting import CampaignWait
from tests.campaign.test_campaign_cluster import Cluster
from tests.conftest import ONE_RUN
from tests.semaphore_processes import wait_until

ROOT = Path(__file__).parents[2]
Call = Callable[..., subprocess.CompletedProcess[str]]
Detach = Callable[..., Path]


@pytest.fixture
def detached(
    retrain: Call, campaign_file: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Path]]:
    """Start the campaign of one run in the background, with these settings; it is stopped at the end."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    started = []

    def detach(*settings: str) -> Path:
        words = [word for setting in (*ONE_RUN, *settings) for word in ("--set", setting)]
        answer = retrain("run", campaign_file.name, "--detach", *words)
        assert answer.returncode == 0, answer.stderr
        started.append(Path(answer.stdout.split()[0]).absolute())
        return started[-1]

    yield detach
    for directory in started:
        stop_campaign(directory, now=True)


def waited(retrain: Call, directory: Path, *options: str) -> tuple[int, dict[str, Any]]:
    answer = retrain("wait", directory, "--json", *options)
    assert answer.stderr == ""
    return answer.returncode, json.loads(answer.stdout)


def test_it_returns_when_the_campaign_is_done(detached: Detach, retrain: Call) -> None:
    directory = detached("reward.reward=tests.plugins.slow")
    code, said = waited(retrain, directory)
    assert (code, said["exit_code"], said["state"], said["attention"]) == (0, 0, "done", [])
    assert waited(retrain, directory) == (code, said)  # also long after


def test_it_exits_as_run_did_when_a_run_failed(detached: Detach, retrain: Call) -> None:
    code, said = waited(retrain, detached("reward.reward=tests.plugins.broken"))
    assert (code, said["state"]) == (4, "failed")
    assert said["resume_with"].endswith("--failed")


def test_it_exits_as_run_did_when_the_campaign_was_stopped(detached: Detach, retrain: Call) -> None:
    directory = detached("campaign.max_steps=100000")
    stop_campaign(directory)
    assert waited(retrain, directory)[0] == 130


def open_refusing(assignment: Assignment) -> Cluster:
    cluster = Cluster()
    cluster.refuses = [LaunchError("unknown account")]
    return cluster


def test_it_exits_as_run_did_when_nothing_could_be_launched(campaign_file: Path, retrain: Call) -> None:
    with pytest.raises(LaunchError) as refused:
        run_campaign(campaign_file, [*ONE_RUN, f"campaign.launcher={__name__}.open_refusing"])
    (directory,) = (campaign_file.parent / "logs").iterdir()
    assert waited(retrain, directory)[0] == refused.value.exit_code == 3


def test_a_worker_that_is_suspended_needs_attention(detached: Detach, retrain: Call) -> None:
    directory = detached("campaign.max_steps=100000")
    run = directory / "runs" / "grpo_s0"
    wait_until(lambda: len(read_metrics(run)) > 1)
    worker = holder(run / "run.lock")
    assert worker is not None
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        code, said = waited(retrain, directory, "--patience", "1s", "--ignore", "no_signal")
        assert (code, said["exit_code"], said["state"]) == (6, 6, "running")
        assert [(each["kind"], each["run"]) for each in said["attention"]] == [("stalled", "grpo_s0")]
    finally:
        os.kill(worker.pid, signal.SIGCONT)


def test_a_campaign_without_a_signal_needs_attention_unless_that_is_ignored(
    detached: Detach, retrain: Call
) -> None:
    directory = detached("campaign.max_steps=100000", "reward.reward=tests.trainer.test_no_signal.never")
    code, said = waited(retrain, directory)
    assert (code, [each["kind"] for each in said["attention"]]) == (6, ["no_signal"])
    assert "no learning signal in steps 1 to" in said["attention"][0]["what"]
    ignoring = CampaignWait(directory, 600.0, ["no_signal"])
    assert ignoring.look() is None
    assert retrain("wait", directory, "--ignore", "noise").returncode == 2


@pytest.mark.parametrize(("load", "run"), [("0.0", "grpo_s0"), ("1.0", "")])
def test_a_long_pause_needs_attention_and_a_short_one_does_not(
    load: str, run: str, detached: Detach, retrain: Call, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOAD_FILE", str(here / "load"))
    throttle = ["throttle.enabled=true", "throttle.load_fn=tests.plugins.loads_from_a_file"]
    (here / "load").write_text(load)
    slow = "backend.options.api_latency_s=0.1"  # a step, so that it leaves the cores to others
    directory = detached("campaign.max_steps=100000", slow, *throttle)
    if run:
        wait_until(lambda: bool(read_metrics(directory / "runs" / run)))
    (here / "load").write_text("1.0")
    code, said = waited(retrain, directory, "--patience", "1s", "--ignore", "no_signal")
    assert (code, [(each["kind"], each["run"]) for each in said["attention"]]) == (6, [("paused", run)])
    assert "load 1.00" in said["attention"][0]["what"]
    assert CampaignWait(directory, 600.0, ["no_signal"]).look() is None


def test_patience_begins_anew_after_each_pause() -> None:
    watch = AttentionWatch(patience_s=10.0, has_queue=False)
    runs = {
        phase: [RunRow(run_id="a", condition="a", seed=0, state="running", max_steps=9, phase=phase)]
        for phase in (API_PAUSED, "sample")
    }
    looks = [(API_PAUSED, 0.0), (API_PAUSED, 9.0), ("sample", 9.5), (API_PAUSED, 11.0), (API_PAUSED, 21.0)]
    kinds = [[each.kind for each in watch.look(runs[phase], now_s)] for phase, now_s in looks]
    assert kinds == [[], [], [], [], ["paused"]]


def test_runs_may_wait_in_a_clusters_queue_for_long() -> None:
    queued = [RunRow(run_id="a", condition="a", seed=0, state="pending", max_steps=9)]
    for has_queue, kinds in ((True, []), (False, ["paused"])):
        watch = AttentionWatch(patience_s=10.0, has_queue=has_queue)
        assert [[each.kind for each in watch.look(queued, now_s)] for now_s in (0.0, 10.0)] == [[], kinds]


def test_a_campaign_whose_orchestrator_was_killed_needs_attention(
    detached: Detach, retrain: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "ARRIVAL_S", 0.0)
    directory = detached("campaign.max_steps=100000")
    orchestrator = holder(directory / "campaign.lock")
    assert orchestrator is not None
    os.kill(orchestrator.pid, signal.SIGKILL)
    wait = CampaignWait(directory, 600.0)
    wait_until(lambda: wait.look() is not None)
    over = wait.look()
    assert over is not None
    assert (over.exit_code, [each.kind for each in over.attention]) == (6, ["unsupervised"])
    assert over.resume_with.startswith("retrain resume ")


def test_a_campaign_that_is_being_started_is_waited_for(campaign_file: Path) -> None:
    assert CampaignWait(start(campaign_file).directory, 600.0).look() is None


def test_what_is_no_campaign_is_an_error(retrain: Call, here: Path) -> None:
    assert retrain("wait", here / "nowhere").returncode == 2
    assert retrain("wait", here).returncode == 2
