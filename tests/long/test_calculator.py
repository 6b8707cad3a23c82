"""A language model learns to use a calculator, on sums that it gets wrong without one."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.calculator import make
from retrain import worker
from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from tests.semaphore_processes import wait_until
from tests.test_trainer import make_run

SAVED, KILLED, ENDED = 6, 7, 9  # steps


@pytest.mark.timeout(600)
def test_a_language_model_learns_to_use_a_calculator(
    here: Path, retrain: Callable[..., subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign_file = make(here, steps=12)
    ran = retrain("run", campaign_file.name)
    assert ran.returncode == 0, ran.stderr
    (campaign,) = (here / "logs").iterdir()
    alone, rows = (read_metrics(campaign / "runs" / f"{name}_s0") for name in ("alone", "calculator"))
    assert alone[-1]["eval_correct_rate"] < 0.1
    assert rows[0]["mean_reward"] < 0.15
    assert rows[-1]["eval_correct_rate"] > 0.8
    assert rows[0]["tool_calls"] < 32 < 64 < rows[-1]["tool_calls"]  # of 128 episodes

    shown = retrain("samples", campaign, "calculator_s0", "--best", "-n", 1).stdout
    assert "2 turns  1 tool call" in shown
    assert '{"name": "add", "arguments": {"a": ' in shown
    assert "observed " in shown
    assert "eval_reward" in retrain("compare", campaign).stdout

    monkeypatch.syspath_prepend(str(here))
    tables = tomllib.loads(campaign_file.read_text())
    tables["training"] |= {"seed": 0, "max_steps": ENDED}
    killed = make_run(here / "killed", {key: tables[key] for key in tables if key != "campaign"})
    kill_at_step(killed, here)
    assert worker.run(killed.directory, threading.Event()) == 0
    resumed = read_metrics(killed.directory)
    assert [row["attempt"] for row in resumed] == [1] * SAVED + [2] * (ENDED - SAVED)
    assert [row["step"] for row in resumed] == [*range(1, ENDED + 1)]
    assert resumed[-1]["mean_reward"] > 3 * resumed[0]["mean_reward"]


def kill_at_step(run: RunFiles, here: Path) -> None:
    """Let a worker train, and kill it between two checkpoints."""
    command = [sys.executable, "-m", "retrain.worker", str(run.directory)]
    with subprocess.Popen(command, cwd=here) as process:
        wait_until(lambda: process.poll() is not None or len(read_metrics(run.directory)) >= KILLED)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert len(read_metrics(run.directory)) < ENDED
