"""pass@k, against counting by hand."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.trainer.evaluation import pass_at_k


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=4), st.integers(1, 6))
def test_it_is_the_share_of_draws_of_k_that_hold_a_right_one(correct: list[list[bool]], k: int) -> None:
    shares = [np.mean([any(draw) for draw in combinations(row, k)]) for row in correct]
    assert pass_at_k(np.array(correct), k) == pytest.approx(np.mean(shares))


def test_one_try_is_the_share_of_right_ones() -> None:
    assert pass_at_k(np.array([[True, False, False, False]]), 1) == pytest.approx(0.25)


def test_many_samples_do_not_overflow() -> None:
    correct = np.zeros((1, 10_000), dtype=bool)
    correct[0, :100] = True
    assert pass_at_k(correct, 1) == pytest.approx(0.01)
    assert 0.999 < pass_at_k(correct, 1000) <= 1


@pytest.mark.parametrize(("shape", "k"), [((0, 4), 1), ((2, 4), 5), ((2, 4), 0)])
def test_more_tries_than_samples_are_refused(shape: tuple[int, int], k: int) -> None:
    with pytest.raises(ValueError, match="needs 1 <= k <= samples"):
        pass_at_k(np.zeros(shape, dtype=bool), k)


@given(
    st.lists(st.lists(st.sampled_from([True, False, None]), min_size=5, max_size=5), min_size=1, max_size=4),
    st.integers(1, 5),
)
def test_an_unscored_completion_is_no_try_at_all(verdicts: list[list[bool | None]], k: int) -> None:
    known = [[verdict for verdict in row if verdict is not None] for row in verdicts]
    shares = [np.mean([any(draw) for draw in combinations(row, k)]) for row in known if len(row) >= k]
    correct, scored = np.array(verdicts) == True, np.array(verdicts) != None  # noqa: E711, E712
    expected = pytest.approx(np.mean(shares)) if shares else None
    assert pass_at_k(correct, k, scored) == expected
