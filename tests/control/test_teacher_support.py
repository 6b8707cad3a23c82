"""The sign that a policy writes what its teacher never would."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np

from retrain.control.rules.signs import TeacherSupport


def named(shares: list[float]) -> list[int]:
    """The steps in which it is notable."""
    support = TeacherSupport()
    return [step for step, share in enumerate(shares, 1) if support.observe(share, step)]


def test_a_policy_that_comes_to_its_teacher_is_never_named() -> None:
    assert named([0.9 * 0.97**step for step in range(200)]) == []


def test_a_few_such_tokens_are_never_named() -> None:
    assert named(list(np.random.default_rng(0).uniform(0, 0.1, 200))) == []


def test_a_policy_that_stays_or_goes_away_is_named_after_twenty_steps() -> None:
    assert named([0.5] * 30) == list(range(20, 31))
    away = named([min(0.01 * step, 0.6) for step in range(100)])
    assert away == list(range(away[0], 101))


def test_it_is_named_no_more_once_it_comes_back() -> None:
    assert max(named([0.5] * 30 + [0.02] * 30)) < 42


def test_the_sign_survives_json_and_says_what_to_do() -> None:
    support = TeacherSupport()
    for step in range(1, 25):
        support = TeacherSupport(**json.loads(json.dumps(asdict(support))))
        sign = support.observe(0.3, step)
    assert "hardly ever have written 30% of the policy's tokens in steps 15 to 24" in sign
    assert "start from a better policy" in sign
