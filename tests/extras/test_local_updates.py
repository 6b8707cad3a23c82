"""Several optimizer steps on one batch of a transformer: the same after a resume."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from retrain.records.metrics import read_metrics
from retrain.trainer import worker
from tests.clocks import without_times
from tests.extras.tiny_models import save_tiny_model
from tests.stopping import StopAfterStep
from tests.trainer.test_trainer import make_run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=64)


def test_a_run_with_several_updates_and_dropout_resumes_to_the_same_rows(model, tmp_path: Path):
    raw = {
        "model": {"model": model, "lora_rank": 4},
        "training": {
            "seed": 3,
            "max_steps": 3,
            "batch_size": 4,
            "group_size": 3,
            "max_tokens": 4,
            "temperature": 1.0,
            "lr": 1e-2,
            "updates_per_batch": 2,
            "minibatches": 2,
            "save_every": 1,
        },
        "algorithm": {"kl_coef": 0.01},
        "data": {"task": "successor"},
        "reward": {"reward": "tests.reward_functions.spelled"},  # groups hardly ever tie
        "backend": {
            "backend": "local",
            "options": {"local_files_only": True, "device": "cpu", "lora_dropout": 0.2},
        },
    }
    whole = make_run(tmp_path / "whole", raw)
    assert worker.run(whole.directory, threading.Event()) == 0
    broken = make_run(tmp_path / "broken", raw)
    assert worker.run(broken.directory, StopAfterStep(broken, 2)) == 130
    assert worker.run(broken.directory, threading.Event()) == 0
    rows = read_metrics(whole.directory)
    assert without_times(read_metrics(broken.directory)) == without_times(rows)
    assert {row["updates"] for row in rows} == {4}
    assert rows[-1]["approx_kl"] > 0
