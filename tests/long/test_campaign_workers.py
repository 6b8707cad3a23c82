"""Workers in processes of their own that are late, stopped, short of permits, or without orchestrator."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from retrain.base.locks import is_held
from retrain.campaign import Observer
from retrain.campaign.endings import Ending
from retrain.campaign.run import reopen, run_campaign, start
from retrain.control.semaphore import FileSemaphore
from retrain.plan.matrix import RunPlan
from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from retrain.records.run_state import RunState
from tests.conftest import ONE_RUN
from tests.long.test_campaign import INLINE, ONE_SEED, ROOT, runs_of
from tests.semaphore_processes import wait_until


@pytest.fixture(autouse=True)
def _plugins_are_found_by_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_a_run_that_takes_too_long_is_ended_as_timeout(campaign_file: Path) -> None:
    campaign_file.write_text(campaign_file.read_text() + '[reward]\nreward = "tests.plugins.slow"\n')
    sets = ["campaign.max_steps=100000", "campaign.run_timeout=1.5", *ONE_RUN]
    outcome = run_campaign(campaign_file, sets)
    assert set(outcome.states.values()) == {RunState.TIMEOUT}
    assert outcome.exit_code == 4


def gated(campaign_file: Path, reward: str) -> Path:
    """Choose a reward that waits for a file; return the file."""
    gate = campaign_file.with_name("gate")
    own = f'[reward]\nreward = "tests.plugins.{reward}"\nparams.gate = "{gate}"\n'
    campaign_file.write_text(campaign_file.read_text() + own)
    return gate


class StopWhenRowsExist(Observer):
    """Asks for a stop as soon as the first run has a row."""

    def __init__(self) -> None:
        self.stop = lambda: None
        self._directory: Path | None = None

    def begun(self, files: object, runs: Sequence[RunPlan], workers: int) -> None:
        self._directory = files.runs  # type: ignore[attr-defined]

    def started(self, run: RunPlan) -> None:
        assert self._directory is not None
        metrics = self._directory / run.run_id / "metrics.jsonl"
        threading.Thread(target=self._wait_for, args=(metrics,)).start()

    def _wait_for(self, metrics: Path) -> None:
        while not (metrics.exists() and metrics.stat().st_size):
            threading.Event().wait(0.01)
        self.stop()


def test_a_stopped_campaign_resumes_to_the_same_result(campaign_file: Path) -> None:
    gate = gated(campaign_file, "slow_until")
    sets = ["campaign.max_steps=8", "training.save_every=0", *ONE_RUN]
    stopping = StopWhenRowsExist()
    campaign = start(campaign_file, sets, stopping)
    stopping.stop = campaign.stop
    stopped = campaign.execute()
    assert stopped.exit_code == 130
    assert RunState.INTERRUPTED in stopped.states.values()
    gate.touch()
    resumed = reopen(stopped.directory).execute()
    assert resumed.exit_code == 0
    undisturbed = run_campaign(campaign_file, [*sets, INLINE])
    for one, other in zip(runs_of(resumed), runs_of(undisturbed), strict=True):
        keys = ("step", "loss", "mean_reward", "grad_norm")
        assert [[r[k] for k in keys] for r in read_metrics(one)] == [
            [r[k] for k in keys] for r in read_metrics(other)
        ]


def test_a_rehearsed_api_never_has_more_calls_in_flight_than_permits(campaign_file: Path) -> None:
    permits = campaign_file.with_name("permits")
    campaign_file.write_text(
        campaign_file.read_text()
        + f'[backend]\nmax_concurrent = 1\nthrottle_dir = "{permits}"\noptions.api_latency_s = 0.001\n'
    )
    each = [*ONE_SEED, "training.eval_at_start=false"]  # else one run evaluates for both
    with ThreadPoolExecutor(1) as threads:
        with FileSemaphore(permits, 1):
            running = threads.submit(run_campaign, campaign_file, each)
            wait_until(lambda: FileSemaphore.inspect(permits).waiting == 2 or running.done())
            assert not running.done()
        outcome = running.result()
    assert outcome.exit_code == 0
    assert all(read_metrics(p)[0]["permit_wait_s"] > 0 for p in runs_of(outcome))


def test_workers_outlive_a_killed_orchestrator_and_are_adopted(campaign_file: Path, here: Path) -> None:
    gate = gated(campaign_file, "held")
    orchestrator = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "retrain",
            campaign_file.name,
            "--set",
            "campaign.max_steps=12",
            "--set",
            "campaign.seeds=[0]",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert orchestrator.stderr is not None
    for line in orchestrator.stderr:
        if "started" in line:
            break
    directory = next((here / "logs").iterdir())
    locks = [RunFiles(p).lock for p in sorted((directory / "runs").iterdir())]
    wait_until(lambda: any(map(is_held, locks)) or orchestrator.poll() is not None)
    assert orchestrator.poll() is None
    orchestrator.send_signal(signal.SIGKILL)
    orchestrator.wait()
    orchestrator.stderr.close()
    assert any(is_held(lock) for lock in locks)
    gate.touch()
    assert reopen(directory).execute().exit_code == 0
    assert all(
        [r["step"] for r in read_metrics(p)] == list(range(1, 13)) for p in (directory / "runs").iterdir()
    )


class Relief(Observer):
    """Lets threads start again once a run is to be retried."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def retrying(self, run: RunPlan, ending: Ending, delay_s: float) -> None:
        threading.stack_size(0)
        self.said.append(ending.message)


def test_a_run_for_which_no_thread_can_start_is_tried_again(campaign_file: Path) -> None:
    relief = Relief()
    campaign = start(campaign_file, ONE_RUN, relief)
    threading.stack_size(1 << 52)  # more than any address space has
    try:
        outcome = campaign.execute()
    finally:
        threading.stack_size(0)
    assert len(relief.said) == 1
    assert "grpo_s0: no thread can be started for its worker (can't start new thread)" in relief.said[0]
    assert outcome.exit_code == 0
    assert len(read_metrics(campaign.files_of("grpo_s0").directory)) == 4
