"""A campaign is stopped, left running and followed from anywhere, whether its orchestrator lives or not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from retrain.base.errors import EXIT_INTERRUPTED, EXIT_LAUNCH, ConfigError
from retrain.base.locks import hold, holder, is_held
from retrain.campaign.run import reopen, start
from retrain.campaign.stop import PAUSE_S, stop_campaign
from retrain.cli.render.status import warnings
from retrain.records.campaign_state import asked_to_stop
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.metrics import read_metrics
from retrain.records.run_state import RunState, read_attempts
from retrain.results.status import survey
from retrain.trainer.worker import run as run_worker
from tests.conftest import ONE_RUN
from tests.semaphore_processes import wait_until

ROOT = Path(__file__).parents[2]
SET_ONE_RUN = [word for setting in ONE_RUN for word in ("--set", setting)]
LONG = ["campaign.max_steps=100000", "campaign.seeds=[0]", "reward.reward=tests.plugins.slow"]
Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def _plugins_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture
def left_running(retrain: Call, campaign_file: Path) -> Iterator[Path]:
    """A campaign of two endless runs in the background, past their first steps."""
    sets = [word for setting in LONG for word in ("--set", setting)]
    answer = retrain("run", campaign_file.name, "--detach", *sets)
    assert answer.returncode == 0, answer.stderr
    directory = Path(re.search(r"^(\S+) runs in the background as process", answer.stdout)[1]).absolute()  # type: ignore[index]
    for name in ("grpo_s0", "maxrl_s0"):
        wait_until(lambda name=name: bool(read_metrics(directory / "runs" / name)))  # type: ignore[misc]
    yield directory
    stop_campaign(directory, now=True)


def orchestrator_of(directory: Path) -> int:
    found = holder(directory / "campaign.lock")
    assert found is not None
    return found.pid


def locks_of(directory: Path) -> list[Path]:
    return [RunFiles(run).lock for run in sorted((directory / "runs").iterdir())]


def endings_of(directory: Path) -> list[str | None]:
    runs = sorted((directory / "runs").iterdir())
    return [read_attempts(RunFiles(run).attempts)[-1].ending for run in runs]


def test_a_detached_campaign_is_shown_followed_and_stopped_by_its_directory(
    left_running: Path, retrain: Call
) -> None:
    assert "running" in retrain("status", left_running).stdout
    assert "started grpo_s0" in retrain("logs", left_running).stdout
    following = subprocess.Popen(
        [sys.executable, "-m", "retrain", "logs", str(left_running), "-f"], stdout=subprocess.PIPE, text=True
    )
    stopped = retrain("stop", left_running)
    assert (stopped.returncode, "retrain resume" in stopped.stdout) == (0, True)
    said, _ = following.communicate()
    assert "interrupted grpo_s0" in said
    assert not any(map(is_held, [left_running / "campaign.lock", *locks_of(left_running)]))
    assert endings_of(left_running) == ["interrupted", "interrupted"]


@pytest.mark.parametrize("damaged", ["manifest.json", "origin.json"])
def test_workers_of_a_dead_orchestrator_save_and_leave_whatever_of_the_campaigns_own_files_is_damaged(
    left_running: Path, damaged: str
) -> None:
    os.kill(orchestrator_of(left_running), signal.SIGKILL)
    wait_until(lambda: not is_held(left_running / "campaign.lock"))
    (left_running / damaged).write_text("{")
    found = stop_campaign(left_running)
    assert (found.was_supervised, found.workers) == (False, ("grpo_s0", "maxrl_s0"))
    assert not any(map(is_held, locks_of(left_running)))
    assert endings_of(left_running) == ["interrupted", "interrupted"]
    for run in (left_running / "runs").iterdir():
        steps = len(read_metrics(run))
        assert (run / "checkpoints" / f"step-{steps:06d}").is_dir()


def test_one_run_with_unreadable_attempts_keeps_no_worker_running(left_running: Path) -> None:
    os.kill(orchestrator_of(left_running), signal.SIGKILL)
    wait_until(lambda: not is_held(left_running / "campaign.lock"))
    attempts = RunFiles(left_running / "runs" / "grpo_s0").attempts
    kept = attempts.rename(attempts.with_name("kept"))
    attempts.mkdir()
    said: list[str] = []
    try:
        assert stop_campaign(left_running, on_wait=said.append).workers == ("grpo_s0", "maxrl_s0")
    finally:
        attempts.rmdir()
        kept.rename(attempts)
    assert f"{attempts}: is not a regular file; move it away" in said
    assert not any(map(is_held, locks_of(left_running)))
    assert endings_of(left_running)[1] == "interrupted"


def test_a_worker_that_a_dead_orchestrator_was_starting_finds_the_campaign_stopped(
    campaign_file: Path,
) -> None:
    directory = start(campaign_file, ["campaign.launcher=inline"]).directory
    stop_campaign(directory)
    assert run_worker(directory / "runs" / "grpo_s0", threading.Event()) == EXIT_INTERRUPTED
    assert not (directory / "runs" / "grpo_s0" / "attempts.jsonl").exists()
    assert reopen(directory).execute().exit_code == 0


def test_a_stop_that_cannot_be_written_reaches_the_orchestrator_as_a_signal(left_running: Path) -> None:
    (left_running / "stop.json").mkdir()  # in the file's place
    assert stop_campaign(left_running).was_supervised
    assert endings_of(left_running) == ["interrupted", "interrupted"]


def test_a_stop_that_cannot_be_written_lets_the_workers_save(left_running: Path) -> None:
    (left_running / "stop.json").symlink_to("nowhere")  # does not exist, and cannot be written: a full disk
    assert stop_campaign(left_running).was_supervised
    runs = (RunFiles(run) for run in (left_running / "runs").iterdir())
    assert [read_attempts(run.attempts)[-1].exit_code for run in runs] == [EXIT_INTERRUPTED] * 2


def test_an_orchestrator_that_renews_its_lease_is_waited_for_until_it_has_left(campaign_file: Path) -> None:
    files = CampaignFiles(start(campaign_file).directory)
    orchestrator = hold(files.lock)
    assert orchestrator is not None
    orchestrator.renew(every_s=0.001)
    asked, said = threading.Event(), []
    waiting = threading.Thread(
        target=lambda: said.append(stop_campaign(files.directory, on_wait=lambda _: asked.set()))
    )
    waiting.start()
    asked.wait()
    first = holder(files.lock)
    wait_until(lambda: holder(files.lock) not in (first, None))
    waiting.join(3 * PAUSE_S)
    assert waiting.is_alive()
    orchestrator.release()
    waiting.join()
    assert said[0].was_supervised


def test_stop_now_kills_and_the_runs_are_interrupted_not_failed(left_running: Path) -> None:
    found = stop_campaign(left_running, now=True)
    assert found.was_supervised
    assert not any(map(is_held, locks_of(left_running)))
    assert endings_of(left_running) == ["interrupted", "interrupted"]


def test_an_inline_campaign_is_stopped_from_elsewhere_at_its_next_step(
    retrain: Call, campaign_file: Path, here: Path
) -> None:
    sets = [word for setting in [*LONG, "campaign.launcher=inline"] for word in ("--set", setting)]
    process = subprocess.Popen(
        [sys.executable, "-m", "retrain", "run", campaign_file.name, *sets], stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: any((here / "logs").glob("*/runs/grpo_s0/metrics.jsonl")))
        (directory,) = (here / "logs").iterdir()
        assert retrain("stop", directory).returncode == 0
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.wait()
    (attempt,) = read_attempts(directory / "runs" / "grpo_s0" / "attempts.jsonl")
    assert attempt.ending == "interrupted"
    assert not (directory / "runs" / "maxrl_s0" / "attempts.jsonl").exists()


def test_a_suspended_orchestrator_and_a_suspended_worker_are_woken_to_leave(left_running: Path) -> None:
    run = RunFiles(left_running / "runs" / "grpo_s0")
    worker = holder(run.lock)
    assert worker is not None
    os.kill(worker.pid, signal.SIGSTOP)
    os.kill(orchestrator_of(left_running), signal.SIGSTOP)
    assert stop_campaign(left_running).was_supervised
    assert read_attempts(run.attempts)[-1].ending == "interrupted"


def test_status_says_for_how_long_a_suspended_worker_has_done_nothing(left_running: Path) -> None:
    run = RunFiles(left_running / "runs" / "grpo_s0")
    wait_until(lambda: len(read_metrics(run.directory)) > 2)
    worker = holder(run.lock)
    assert worker is not None
    os.kill(worker.pid, signal.SIGSTOP)

    def told() -> list[str]:
        (campaign,) = survey(left_running)
        return [line.plain for line in warnings(campaign.runs) if line.plain.startswith("grpo_s0: nothing")]

    try:
        wait_until(lambda: bool(told()))
        usual = r", where a step takes [\d.]+ s; is its worker suspended\?"
        assert re.fullmatch(rf"grpo_s0: nothing has happened for [\d.]+ s{usual}", told()[0])
        assert survey(left_running)[0].eta_s is None
    finally:
        os.kill(worker.pid, signal.SIGCONT)
    wait_until(lambda: not told())


def test_stopping_what_does_not_run_changes_nothing(campaign_file: Path) -> None:
    directory = start(campaign_file).directory
    found = stop_campaign(directory)
    assert (found.was_supervised, found.workers) == (False, ())
    with pytest.raises(ConfigError, match="is a part of a campaign; name that: "):
        stop_campaign(directory / "runs")


def test_a_request_that_came_too_late_does_not_stop_the_next_resume(campaign_file: Path) -> None:
    campaign = start(campaign_file, ["campaign.launcher=inline"])
    files = CampaignFiles(campaign.directory)
    files.stop_request.write_text('{"now": true}')
    assert asked_to_stop(files) == 2
    assert reopen(campaign.directory).execute().exit_code == 0
    assert asked_to_stop(files) == 0


def test_a_stop_before_anything_was_launched_launches_nothing(campaign_file: Path) -> None:
    campaign = start(campaign_file)
    campaign.stop()
    outcome = campaign.execute()
    assert set(outcome.states.values()) == {RunState.PENDING}
    assert outcome.exit_code == 130
    assert reopen(campaign.directory)


def test_detaching_a_campaign_that_runs_names_its_orchestrator_alone(
    left_running: Path, retrain: Call
) -> None:
    refused = retrain("resume", left_running, "--detach")
    assert refused.returncode == EXIT_LAUNCH
    who = f"is supervised by process {orchestrator_of(left_running)} on "
    assert refused.stderr.startswith(f"{left_running}: {who}")


def test_detaching_a_campaign_that_cannot_start_says_why(retrain: Call, campaign_file: Path) -> None:
    refused = retrain("run", campaign_file.name, "--detach", "--set", "training.lr=-1")
    assert (refused.returncode, "training.lr" in refused.stderr) == (2, True)
    assert not Path("logs").exists()


def test_a_module_of_the_same_name_as_pythons_does_not_end_a_detached_campaign(
    retrain: Call, campaign_file: Path, here: Path
) -> None:
    (here / "queue.py").write_text("raise SystemExit('this is not the queue that was meant')")
    started = subprocess.run(  # as the installed command, which has no current directory on its path
        [sys.executable, "-P", "-m", "retrain", "run", campaign_file.name, "--detach", *SET_ONE_RUN],
        capture_output=True,
        text=True,
        check=True,
    )
    directory = Path(re.search(r"^(\S+) runs in the background", started.stdout)[1])  # type: ignore[index]
    wait_until(lambda: not is_held(directory / "campaign.lock"))
    assert "(1 of 1)" in (directory / "campaign.log").read_text()
