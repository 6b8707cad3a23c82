"""Rewards: 1 for the answer, and honest credit short of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.base.registry import find_plugin
from retrain.base.rollouts import Prompt
from retrain.plugins.rewards import match, partial
from retrain.plugins.rewards.opening import is_pure

TEXTS = st.text("0123456789 =", max_size=6)


def prompt(answer: str) -> Prompt:
    return Prompt(0, "372=", answer)


def test_match_gives_one_for_the_answer_and_zero_for_anything_else():
    assert match.score("237", prompt("237")) == 1.0
    assert match.score("2371", prompt("237")) == 0.0


def test_match_puts_blanks_around_aside():
    assert match.score(" 237\n", prompt("237 ")) == 1.0
    assert match.score("2 37", prompt("237")) == 0.0


def test_partial_is_the_square_of_the_share_of_places_that_agree():
    assert partial.score("239", prompt("237")) == pytest.approx(4 / 9)
    assert partial.score("239", prompt("237"), power=1.0) == pytest.approx(2 / 3)


def test_partial_counts_places_of_the_longer_text():
    assert partial.score("23", prompt("237"), power=1) == pytest.approx(2 / 3)
    assert partial.score("237777", prompt("237"), power=1) == pytest.approx(1 / 2)


def test_partial_gives_nothing_for_an_empty_completion():
    assert partial.score("", prompt("237")) == 0.0


@given(completion=TEXTS, answer=TEXTS)
def test_partial_gives_one_exactly_where_match_does(completion, answer):
    credit = partial.score(completion, prompt(answer))
    assert 0 <= credit <= 1
    assert (credit == 1) == (match.score(completion, prompt(answer)) == 1)


def test_both_are_found_by_name():
    assert find_plugin("rewards", "match") is match.score
    assert find_plugin("rewards", "partial") is partial.score


@pytest.mark.parametrize(
    ("name", "params", "is_so"),
    [
        ("python", {}, True),
        ("judge", {}, False),
        ("tests.plugins.pure.score", {}, True),
        ("tests.plugins.slow", {}, False),
        ("custom", {"path": "tests.plugins.pure.score"}, True),
        ("custom", {"path": "tests.plugins.slow"}, False),
        ("weighted", {"parts": {"match": 1.0, "math": 0.5}}, True),
        ("weighted", {"parts": {"match": 1.0, "judge": 0.5}}, False),
    ],
)
def test_any_process_may_score_where_a_reward_and_all_its_parts_say_so(name, params, is_so):
    assert is_pure(name, params) is is_so
