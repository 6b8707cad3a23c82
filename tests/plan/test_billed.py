"""What a run was billed is told apart: steps, evaluations, and what belongs to neither."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retrain.plan.estimate.history import read_run_times
from retrain.plugins.tasks import successor
from retrain.records.metrics import read_metrics
from retrain.records.spending import read_spending
from tests.trainer.test_trainer import SMALL, train

LENGTHS = [len(prompt.text) for prompt in successor.build(seed=0).held_out]
BILLED = {
    **SMALL,
    "training": {**SMALL["training"], "eval_every": 2},
    "data": {"task": "successor", "eval_prompts": 2, "eval_samples": 3},
    "eval": {"tables": [{"name": "hard", "every": 3, "prompts": 4}]},
    "rate_limiter": {"max_staleness": 1},
    "budget": {"prices": {"numpy": {"sample": 1.0}}},
}


def test_steps_evaluations_and_the_rest_are_told_apart(tmp_path: Path) -> None:
    """Also while rollouts of the next step are sampled beside an evaluation."""
    rows = [json.dumps({"prompt": "1=", "completion": "2"})] * 8
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    warmup = {"path": str(tmp_path / "rows.jsonl"), "steps": 5, "batch_size": 4}
    files = train(tmp_path / "r", {**BILLED, "warmup": warmup})
    found, spent = read_run_times(files.directory), read_spending(files)
    assert found is not None
    assert spent is not None
    own, hard = (found.billed.evaluations[name] for name in ("eval_", "eval_hard_"))
    two, four = (
        sum(LENGTHS[:2]),
        sum(LENGTHS[:4]),
    )  # greedy, then three samples a prompt; each also before training
    assert [(one.prefill, one.cached, one.train) for one in own] == [(2 * two, 2 * two, 0)] * 4
    assert [(one.prefill, one.cached, one.train) for one in hard] == [(four, 0, 0)] * 3
    steps, told = found.billed.steps, read_metrics(files.directory)
    usual = told[
        2:4
    ]  # of 6: a batch was sampled ahead in the first two, and nothing was left for the last two
    assert [one.train > 0 for one in steps] == [row["zero_signal_group_fraction"] < 1 for row in usual]
    assert all(0 <= one.cached == 3 * one.prefill for one in steps)  # groups of four, evaluations left out
    updates = [json.loads(line) for line in files.warmup.read_text().splitlines()]
    warmed, trained = (sum(row["trained_tokens"] for row in some) for some in (updates, told))
    assert found.billed.rest is not None
    assert warmed > 0
    assert found.billed.rest.train == trained
    assert found.billed.warm_up is not None
    assert found.billed.warm_up.train == warmed
    assert found.warm_up_s == pytest.approx(sum(row["step_time_s"] for row in updates))
