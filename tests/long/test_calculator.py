"""A language model learns to use a calculator, on sums that it gets wrong without one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.base.errors import EXIT_DONE
from retrain.campaign.run import run_campaign
from retrain.records.metrics import read_metrics

STEPS = 12


@pytest.mark.timeout(600)
def test_a_language_model_learns_to_use_a_calculator(
    here: Path, retrain: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    from benchmarks.studies.calculator import make  # which imports torch, in this test's process alone

    campaign_file = make(here, steps=STEPS)
    text = campaign_file.read_text()  # what cannot be learned need not be tried on many sums
    campaign_file.write_text(text.replace('name = "alone"', 'name = "alone"\ntraining = { batch_size = 4 }'))
    ran = run_campaign(campaign_file, ["campaign.launcher=inline"])
    assert ran.exit_code == EXIT_DONE
    alone, rows = (read_metrics(ran.directory / "runs" / f"{name}_s0") for name in ("alone", "calculator"))
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert alone[-1]["eval_correct_rate"] < 0.1
    assert rows[0]["mean_reward"] < 0.15
    assert rows[-1]["eval_correct_rate"] > 0.8
    assert rows[0]["tool_calls"] < 32 < 64 < rows[-1]["tool_calls"]  # of 128 episodes

    shown = retrain("samples", ran.directory, "calculator_s0", "--best", "-n", 1).stdout
    assert "2 turns  1 tool call" in shown
    assert '{"name": "add", "arguments": {"a": ' in shown
    assert "observed " in shown
    assert "eval_reward" in retrain("compare", ran.directory).stdout
