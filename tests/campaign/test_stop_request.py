"""A request to stop reaches whoever runs, with nobody there to pass it on."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from retrain.base.errors import EXIT_INFRASTRUCTURE, EXIT_INTERRUPTED, LaunchError
from retrain.campaign import Observer
from retrain.campaign.endings import Ending
from retrain.campaign.run import start
from retrain.campaign.stop import SHOWN_RUNS, _whom_it_stops, stop_campaign
from retrain.plan.matrix import RunPlan
from retrain.records.campaign_state import ask_to_stop, asked_to_stop
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.metrics import read_metrics
from retrain.records.run_state import RunState, read_attempts
from retrain.trainer import worker

ASKING = """
from pathlib import Path
from retrain.records.layout import CampaignFiles
from retrain.records.campaign_state import ask_to_stop
def score(completion, prompt):
    ask_to_stop(CampaignFiles(Path(Path("asked.txt").read_text())), now=False)
    return 0.0
"""


def test_a_worker_reads_the_request_while_it_runs(
    campaign_file: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(here)
    (here / "asking.py").write_text(ASKING)
    (here / "asked.txt").touch()
    steps = 3000
    campaign = start(campaign_file, ["reward.reward=asking.score", f"campaign.max_steps={steps}"])
    (here / "asked.txt").write_text(str(campaign.directory))
    run = campaign.files_of("grpo_s0")
    assert worker.run(run.directory, threading.Event()) == EXIT_INTERRUPTED
    assert len(read_metrics(run.directory)) < steps
    assert read_attempts(run.attempts)[-1].ending == RunState.INTERRUPTED


def test_a_worker_started_by_hand_in_the_directory_of_runs_reads_the_request(campaign_file: Path) -> None:
    campaign = start(campaign_file)
    ask_to_stop(CampaignFiles(campaign.directory), now=False)
    command = [sys.executable, "-m", "retrain.trainer.worker", "grpo_s0"]
    ended = subprocess.run(command, cwd=campaign.directory / "runs", capture_output=True, text=True)
    assert ended.returncode == EXIT_INTERRUPTED
    assert "its campaign was stopped" in ended.stderr


def test_a_worker_that_cannot_look_for_the_request_for_now_is_tried_again(
    campaign_file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    campaign, stat = start(campaign_file), os.stat
    ask_to_stop(CampaignFiles(campaign.directory), now=False)

    def stale(path: Any, **more: Any) -> os.stat_result:
        if Path(path).parent == campaign.directory:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return stat(path, **more)

    run = campaign.files_of("grpo_s0")
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stale)
        assert worker.run(run.directory, threading.Event()) == EXIT_INFRASTRUCTURE
    assert "campaign.toml: cannot look at (Stale file handle)" in capfd.readouterr().err
    assert worker.run(run.directory, threading.Event()) == EXIT_INTERRUPTED


SILENT_CLUSTER = """
from retrain.campaign.launchers import Ended
from retrain.records.layout import CampaignFiles

def open_launcher(assignment):
    return SilentCluster(assignment)

class SilentCluster:
    queues = True

    def __init__(self, assignment):
        self.assignment, self.polls = assignment, 0

    def queued(self): return ()
    def adopt(self, run_ids): pass
    def wake(self): pass
    def cancel(self, run_ids, *, now): self.assignment.say("no answer")

    def submit(self, run_ids):
        self.assignment.say("taken")
        return run_ids

    def poll(self, timeout_s):  # it answers again after a while
        self.polls += 1
        runs = self.assignment.runs if self.polls > 2 else ()
        return [Ended(run_id, None, taken_back=True) for run_id in runs]
"""


def test_ctrl_c_reaches_queued_runs_while_the_cluster_does_not_answer(
    campaign_file: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CtrlC(Observer):
        def notice(self, text: str) -> None:
            if text == "taken":
                campaign.stop()

    monkeypatch.syspath_prepend(here)
    (here / "silent_cluster.py").write_text(SILENT_CLUSTER)
    campaign = start(campaign_file, ['campaign.launcher="silent_cluster.open_launcher"'], CtrlC())
    assert campaign.execute().was_stopped
    for run in campaign.plan.runs:  # started by the cluster after all
        files = campaign.files_of(run.run_id)
        assert worker.run(files.directory, threading.Event()) == EXIT_INTERRUPTED
        assert not read_attempts(files.attempts)


class Endings(Observer):
    """Keeps how runs ended."""

    def __init__(self) -> None:
        self.seen: dict[str, Ending] = {}

    def ended(self, run: RunPlan, ending: Ending, tail: object) -> None:
        del tail
        self.seen[run.run_id] = ending


def test_how_long_a_run_took_is_what_its_worker_measured(campaign_file: Path) -> None:
    endings = Endings()
    campaign = start(campaign_file, ["campaign.launcher=inline"], endings)
    campaign.execute()
    for run_id, ending in endings.seen.items():
        assert ending.took_s == read_attempts(campaign.files_of(run_id).attempts)[-1].duration_s


class Removed(type(Path())):  # type: ignore[misc]
    """The path of a file that is removed once its existence was asked for."""

    def exists(self) -> bool:
        found: bool = super().exists()
        self.unlink(missing_ok=True)
        return found


def test_a_request_that_a_resume_removes_while_a_worker_looks_stops_nothing(tmp_path: Path) -> None:
    ask_to_stop(CampaignFiles(tmp_path), now=False)
    files = SimpleNamespace(stop_request=Removed(tmp_path / "stop.json"))
    assert asked_to_stop(files) == 0  # type: ignore[arg-type]


def test_a_stop_of_many_runs_names_a_few_and_counts_all(
    campaign_file: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(here)
    has_all = SILENT_CLUSTER.replace(
        "queued(self): return ()", "queued(self): return list(self.assignment.runs)"
    )
    (here / "full_cluster.py").write_text(has_all)
    sets = ['campaign.launcher="full_cluster.open_launcher"', f"campaign.seeds={list(range(8))}"]
    said: list[str] = []
    directory = start(campaign_file, sets).directory
    stopped = stop_campaign(directory, launcher="full_cluster.open_launcher", on_wait=said.append)
    assert len(stopped.workers) == 16
    named = [line for line in said if line.startswith("no orchestrator is alive; stopping ")]
    assert len(named) == SHOWN_RUNS
    assert named[0].endswith("_s0, queued by full_cluster.open_launcher")
    assert f"and {16 - SHOWN_RUNS} more: 16 runs in all" in said


def test_a_launcher_that_only_a_directory_names_is_not_imported(
    campaign_file: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(here)
    (here / "their_cluster.py").write_text(SILENT_CLUSTER)
    directory = start(campaign_file, ['campaign.launcher="their_cluster.open_launcher"']).directory
    (here / "their_cluster.py").write_text("raise SystemExit('imported')")
    monkeypatch.delitem(sys.modules, "their_cluster")
    with pytest.raises(LaunchError, match=r"--launcher their_cluster\.open_launcher") as refused:
        stop_campaign(directory)
    assert "The request to stop is recorded" in str(refused.value)


def test_a_queued_run_whose_lock_cannot_be_read_is_named_as_queued(tmp_path: Path) -> None:
    run = RunFiles(tmp_path)
    run.lock.mkdir()
    said = "no orchestrator is alive; stopping grpo_s0, queued by slurm"
    assert list(_whom_it_stops({"grpo_s0": run}, "slurm")) == [said]
