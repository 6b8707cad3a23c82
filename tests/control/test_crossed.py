"""Variance components of differences by seed and question."""

from __future__ import annotations

import numpy as np
import pytest

from retrain.control.rules.crossed import variance_components


def test_components_are_those_of_a_two_way_table() -> None:
    """By hand: rows 1 3, 5 11; sums of squares 36, 16 and 4, of one degree of freedom each."""
    found = variance_components(np.array([[1.0, 3.0], [5.0, 11.0]]))
    assert (found.square_of_seeds, found.square_of_questions, found.rest) == (36, 16, 4)
    assert (found.seeds, found.questions) == (16, 6)
    assert found.of_a_seed(4) == 17


def test_components_of_many_draws_are_those_drawn() -> None:
    rng = np.random.default_rng(0)
    gains = rng.normal(0, 2, (400, 1)) + rng.normal(0, 3, (1, 300)) + rng.normal(0, 1, (400, 300))
    found = variance_components(gains)
    assert [found.seeds, found.questions, found.rest] == pytest.approx([4, 9, 1], rel=0.2)
