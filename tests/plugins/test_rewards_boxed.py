r"""`match` reads the last \boxed{...}."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.base.rollouts import Prompt
from retrain.plugins.rewards import match
from retrain.plugins.rewards.match import last_boxed


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} or rather \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{}", ""),
        (r"\boxed{1} then cut off: \boxed{2", None),
        ("42", None),
    ],
)
def test_the_last_whole_box_counts(text: str, held: str | None) -> None:
    assert last_boxed(text) == held


@given(st.text())
def test_any_text_can_be_looked_through(text: str) -> None:
    assert last_boxed(text) is None or r"\boxed{" in text


def test_a_boxed_answer_matches_bare_or_boxed() -> None:
    boxed = Prompt(0, "?", r"because 6 x 7 = \boxed{42}")
    assert match.score(r"I think \boxed{42}", Prompt(0, "?", "42")) == 1.0
    assert match.score(r"I think \boxed{42}", boxed) == 1.0
    assert match.score(r"I think \boxed{41}", boxed) == 0.0
    assert match.score("I think 42", Prompt(0, "?", "42")) == 0.0
