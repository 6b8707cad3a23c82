"""Evaluation within a run: it changes nothing that it measures, and each policy is measured once."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

import pytest
import tomli_w

from retrain.config.load import parse
from retrain.config.resolve import as_tables
from retrain.plan.build import plan_runs
from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from retrain.records.run_state import read_done
from retrain.trainer import worker
from tests.clocks import without_times
from tests.stopping import StopAfterStep
from tests.trainer.test_trainer import SMALL, make_run, train


def measured(*, eval_every: int, reward: str = "partial", **data: object) -> dict:
    return {
        **SMALL,
        "training": {**SMALL["training"], "eval_every": eval_every},
        "data": {"task": "copy", "eval_prompts": 5, "eval_samples": 3, **data},
        "reward": {"reward": reward},
    }


def without_evaluation(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith("eval_")} for row in without_times(rows)]


def evaluation_of(row: dict) -> dict:
    return {key: value for key, value in row.items() if key.startswith("eval_")}


def result_of(files: RunFiles) -> dict:
    done = read_done(files.done)
    assert done is not None
    return evaluation_of(dict(done.result))


def test_a_run_that_is_measured_is_the_run_that_is_not(tmp_path: Path) -> None:
    often = read_metrics(train(tmp_path / "often", measured(eval_every=1)).directory)
    never = read_metrics(train(tmp_path / "never", measured(eval_every=0, eval_samples=1)).directory)
    assert [len(evaluation_of(row)) > 0 for row in (*often, *never)] == [True] * 6 + [False] * 6
    assert without_evaluation(often) == without_evaluation(never)


def test_a_run_stopped_half_way_measures_what_an_undisturbed_one_does(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", measured(eval_every=1))
    broken = make_run(tmp_path / "broken", measured(eval_every=1))
    assert worker.run(broken.directory, StopAfterStep(broken, step=3)) == 130
    assert worker.run(broken.directory, threading.Event()) == 0
    assert without_times(read_metrics(broken.directory)) == without_times(read_metrics(whole.directory))


@pytest.mark.parametrize("eval_every", [2, 3, 6])
def test_the_last_row_and_the_result_are_one_evaluation(tmp_path: Path, eval_every: int) -> None:
    files = train(tmp_path / "r", measured(eval_every=eval_every, reward="tests.reward_functions.at_random"))
    assert result_of(files) == evaluation_of(read_metrics(files.directory)[-1])


def test_a_resume_right_at_the_end_does_not_measure_again(tmp_path: Path) -> None:
    files = train(tmp_path / "r", measured(eval_every=3, reward="tests.reward_functions.at_random"))
    files.done.unlink()  # as if the worker had been killed just before it
    assert worker.run(files.directory, threading.Event()) == 0
    assert result_of(files) == evaluation_of(read_metrics(files.directory)[-1])


def test_a_finished_policy_is_measured_again_under_another_configuration(tmp_path: Path) -> None:
    files = train(tmp_path / "r", measured(eval_every=3))
    changed = plan_runs(parse(measured(eval_every=3, eval_prompts=2), "c")).runs[0]
    files.run_toml.write_text(tomli_w.dumps(as_tables(changed.config)))
    assert worker.run(files.directory, threading.Event()) == 0
    assert result_of(files)["eval_prompts"] == 2


def test_a_checkpoint_whose_evaluation_another_version_wrote_is_measured_again(tmp_path: Path) -> None:
    files = train(tmp_path / "r", measured(eval_every=3))
    result = result_of(files)
    files.done.unlink()
    state, digests = (files.checkpoints / "step-000006" / name for name in ("trainer.json", "digests.json"))
    saved = json.loads(state.read_text())
    saved["evals"]["newest"][""]["evaluation"] = {"reward": 2.0, "of_another_version": 1}
    state.write_text(json.dumps(saved))
    sha = hashlib.sha256(state.read_bytes()).hexdigest()
    digests.write_text(json.dumps(json.loads(digests.read_text()) | {"trainer.json": sha}))
    assert worker.run(files.directory, threading.Event()) == 0
    assert without_times([result_of(files)]) == without_times([result])
