"""A language model learns to use a calculator, on sums that it gets wrong without one, although killed."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.calculator import make
from retrain.locks.held import signal_holder
from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from tests.semaphore_processes import wait_until

SAVED, KILLED, STEPS = 6, 7, 12  # steps


@pytest.mark.timeout(600)
def test_a_language_model_learns_to_use_a_calculator(
    here: Path, retrain: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    campaign_file = make(here, steps=STEPS)
    text = campaign_file.read_text()  # what cannot be learned need not be tried on many sums
    campaign_file.write_text(text.replace('name = "alone"', 'name = "alone"\ntraining = { batch_size = 4 }'))
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(retrain, "run", campaign_file.name)
        wait_until(lambda: running.done() or steps_of_calculator(here) >= KILLED)
        (campaign,) = (here / "logs").iterdir()
        calculator = RunFiles(campaign / "runs" / "calculator_s0")
        signal_holder(calculator.lock, signal.SIGKILL)
        ran = running.result()
    assert ran.returncode == 0, ran.stderr
    alone, rows = (read_metrics(campaign / "runs" / f"{name}_s0") for name in ("alone", "calculator"))
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert [row["attempt"] for row in rows] == [1] * SAVED + [2] * (STEPS - SAVED)
    assert alone[-1]["eval_correct_rate"] < 0.1
    assert rows[0]["mean_reward"] < 0.15
    assert rows[-1]["eval_correct_rate"] > 0.8
    assert rows[0]["tool_calls"] < 32 < 64 < rows[-1]["tool_calls"]  # of 128 episodes

    shown = retrain("samples", campaign, "calculator_s0", "--best", "-n", 1).stdout
    assert "2 turns  1 tool call" in shown
    assert '{"name": "add", "arguments": {"a": ' in shown
    assert "observed " in shown
    assert "eval_reward" in retrain("compare", campaign).stdout


def steps_of_calculator(here: Path) -> int:
    return sum(len(read_metrics(run)) for run in here.glob("logs/*/runs/calculator_s0"))
