"""Groups that teach nothing are replaced by further ones, and all that was sampled is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from retrain.records.metrics import read_metrics
from tests.trainer.test_trainer import SMALL, train

STEPS = {"training": {**SMALL["training"], "max_steps": 6, "save_every": 0}}


def rows(tmp_path: Path, **data: object) -> list[dict]:
    raw = {**SMALL, **STEPS, "data": {**SMALL.get("data", {}), **data}}
    return read_metrics(train(tmp_path / "r", raw).directory)


def test_a_refill_samples_further_groups_for_tied_ones(tmp_path: Path) -> None:
    for row in rows(tmp_path, refill="tied"):
        assert row["refill_sampled"] == row["refill_dropped"] <= 3 * row["batch_size"]
        assert row["refill_kept"] <= min(row["refill_sampled"], row["batch_size"])
        sampled = row["batch_size"] + row["refill_sampled"]
        with_signal = round((1 - row["zero_signal_group_fraction"]) * sampled)
        is_exhausted = row["refill_sampled"] == 3 * row["batch_size"]
        assert with_signal == row["batch_size"] or is_exhausted


def test_without_a_refill_rows_tell_nothing_of_one(tmp_path: Path) -> None:
    assert not [key for row in rows(tmp_path) for key in row if key.startswith(("refill_", "curriculum_"))]


def test_a_pool_is_compared_with_what_was_seen(tmp_path: Path) -> None:
    for row in rows(tmp_path, curriculum="pool", refill="tied"):
        assert 0 <= row["curriculum_seen"] <= 1
        bins = {key: value for key, value in row.items() if key.startswith("curriculum_prompts_")}
        assert sum(bins.values()) == row["batch_size"] + row["refill_sampled"]
        solved = [row[key.replace("prompts", "solved")] * n for key, n in bins.items()]
        assert np.sum(solved) == pytest.approx(row["curriculum_seen"] * sum(bins.values()))
