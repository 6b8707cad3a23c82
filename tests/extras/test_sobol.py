"""The points of a sweep against scipy's Sobol sequence."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import qmc

from retrain.config.sweep import MOST_DIMENSIONS, sobol
from tests.config.test_sweep import SMALL, planned


def test_drawn_values_are_sobols_points_shifted_by_the_digest_of_the_seed(tmp_path: Path) -> None:
    plan = planned(tmp_path, SMALL + "training.lr = { log_uniform = [1e-5, 1e-3], samples = 8 }")
    shift = int.from_bytes(hashlib.sha256(b"0 0").digest()[:4]) >> 2
    whole = (qmc.Sobol(1, scramble=False).random(8)[:, 0] * 2**30).astype(int)
    expected = 1e-5 * 100 ** ((whole ^ shift) / 2**30)
    found = [run.config.training.lr for run in plan.first_runs.values()]
    assert found == pytest.approx(expected, rel=0.01)  # names show three digits


def test_the_sequence_is_sobols() -> None:
    ours, theirs = np.array(sobol(512, MOST_DIMENSIONS, None)), qmc.Sobol(MOST_DIMENSIONS, scramble=False)
    assert np.array_equal(ours, theirs.random(512))


@pytest.mark.parametrize("dimensions", [1, 3, 8])
def test_the_shifted_sequence_is_as_even_as_scipys_scrambled_one(dimensions: int) -> None:
    ours = [qmc.discrepancy(np.array(sobol(32, dimensions, seed))) for seed in range(20)]
    theirs = [qmc.discrepancy(qmc.Sobol(dimensions, seed=seed).random(32)) for seed in range(20)]
    drawn = [qmc.discrepancy(np.random.default_rng(seed).random((32, dimensions))) for seed in range(20)]
    assert np.mean(ours) < 1.2 * np.mean(theirs) < np.mean(drawn)
