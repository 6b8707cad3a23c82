"""A step that does not fit in memory is taken again, smaller; the row says so, and nothing is tried twice."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest

from retrain.records.metrics import read_metrics
from retrain.trainer import worker
from tests.small_memory import ROOM
from tests.trainer.test_trainer import SMALL, StopAfterStep, make_run, train


def small(batch_size: int, **sections: dict) -> dict:
    """A run of many steps with a signal in each, on a device that holds few prompts."""
    return {
        **SMALL,
        "training": {**SMALL["training"], "batch_size": batch_size, "max_steps": 40},
        "data": {"task": "copy"},
        "reward": {"reward": "partial"},
        "backend": {"backend": "tests.small_memory.connect"},
        **sections,
    }


def rows_of(tmp_path: Path, raw: dict) -> list[dict]:
    return read_metrics(train(tmp_path / "r", raw).directory)


def test_a_batch_that_does_not_fit_is_sampled_in_parts_and_stays_whole(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, small(16))
    assert {r["batch_size"] for r in rows} == {16}
    assert {r["prompts_at_a_time"] for r in rows} == {4}  # 16, 8 and then 4
    assert [r["out_of_memory_at"] for r in rows] == [8] + [None] * 39


@pytest.mark.parametrize("control", ["batch", "microbatch"])
def test_back_pressure_never_tries_again_what_did_not_fit(tmp_path: Path, control: str) -> None:
    pressure = {"enabled": True, "control": control, "max_batch_size": 16}
    rows = rows_of(tmp_path, small(16, backpressure=pressure))
    assert max(r["prompts_at_a_time"] for r in rows) <= ROOM
    failed = [r["out_of_memory_at"] for r in rows if r["out_of_memory_at"]]
    assert failed == sorted(set(failed), reverse=True)  # each time at a smaller size
    assert failed
    for number, row in enumerate(rows):
        size = row["out_of_memory_at"] or math.inf
        assert all(later["bp_batch_size"] < size for later in rows[number:])


def test_what_did_not_fit_is_remembered_over_a_resume(tmp_path: Path) -> None:
    raw = small(16, backpressure={"enabled": True, "max_batch_size": 32})
    raw["training"]["save_every"] = 1
    files = make_run(tmp_path / "r", raw)
    assert worker.run(files.directory, StopAfterStep(files, step=30)) == 130
    before = [r["out_of_memory_at"] for r in read_metrics(files.directory) if r["out_of_memory_at"]]
    assert worker.run(files.directory, threading.Event()) == 0
    after = [r["out_of_memory_at"] for r in read_metrics(files.directory)[30:] if r["out_of_memory_at"]]
    assert before
    assert all(failed < min(before) for failed in after)


def test_a_unit_sampled_beside_training_shrinks_and_the_batch_stays_whole(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, small(16, rate_limiter={"max_staleness": 1}))
    assert {r["batch_size"] for r in rows} == {16}
    assert {r["rate_prompts_at_a_time"] for r in rows} == {4}  # 16, 8 and then 4
    assert {r["rate_dropped"] for r in rows} == {0}


def test_held_out_prompts_that_do_not_fit_are_evaluated_in_parts(tmp_path: Path) -> None:
    raw = small(2)
    raw["data"] = {**raw["data"], "eval_prompts": 3 * ROOM}
    raw["training"] |= {"max_steps": 2, "eval_every": 1}
    assert [r["eval_prompts"] for r in rows_of(tmp_path, raw)] == [3 * ROOM, 3 * ROOM]
