"""Weighted sums of rewards."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import pytest

from retrain.base.errors import ConfigError
from retrain.base.rollouts import Prompt
from retrain.plugins.rewards import Answer, BatchScorer, Outcome, Score, UnscoredError, weighted
from retrain.plugins.rewards.opening import RewardRange
from retrain.plugins.rewards.weighted import OpenPart, WeightedScorer

PROMPT = Prompt(0, "372=", "237")
FUNCTIONS = "tests.reward_functions"


def test_parts_are_added_up_by_weight() -> None:
    parts = {
        "match": 0.8,
        "length": {"reward": f"{FUNCTIONS}.length", "weight": 0.2, "params": {"longest": 6}},
    }
    assert weighted.score("237", PROMPT, parts=parts) == pytest.approx(0.8 + 0.2 * 3 / 6)
    assert weighted.score("372372", PROMPT, parts=parts) == pytest.approx(0.2)


def test_one_reward_may_stand_twice_and_a_weight_may_be_negative() -> None:
    parts = {
        "linear": {"reward": "partial", "weight": 1, "params": {"power": 1}},
        "square": {"reward": "partial", "weight": -1.0},
    }
    assert weighted.score("239", PROMPT, parts=parts) == pytest.approx(2 / 3 - 4 / 9)


def test_plain_coroutine_pooled_and_nested_parts_work_together() -> None:
    pooled = {"reward": "custom", "weight": 1.0, "params": {"path": f"{FUNCTIONS}.by_command"}}
    nested = {"reward": "weighted", "weight": 2.0, "params": {"parts": {"match": 0.5}}}
    parts = {"match": 1.0, f"{FUNCTIONS}.slowly_right": 1.0, "pooled": pooled, "nested": nested}
    assert weighted.score("237", PROMPT, parts=parts) == 4.0


def test_a_part_that_cannot_tell_leaves_the_sum_unknown() -> None:
    with pytest.raises(UnscoredError, match="asked not to tell"):
        weighted.score("unscored", PROMPT, parts={"match": 1.0, f"{FUNCTIONS}.by_command": 1.0})


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({}, "parts: got {}; needs a table of rewards"),
        ({"match": "much"}, "parts.match: got 'much'; needs a weight, or a table"),
        ({"match": float("nan")}, "parts.match: got nan"),
        ({"match": {}}, "parts.match.weight: got None; needs a number"),
        ({"match": {"weight": 1, "wait": 2}}, "parts.match.wait: unknown key"),
        ({"mtach": 1.0}, "parts.mtach: 'mtach' is not a known reward; did you mean 'match'?"),
        ({"partial": {"weight": 1, "params": {"pwoer": 1}}}, "parts.partial.params.pwoer: unknown parameter"),
        ({"python": {"weight": 1, "params": {"workers": -1}}}, "parts.python.params.workers: got -1"),
    ],
)
def test_what_is_wrong_with_a_part_is_told_with_its_place(parts: dict, said: str) -> None:
    assert said in "\n".join(problem.in_table for problem in weighted.check_params({"parts": parts}))
    with pytest.raises(ConfigError):
        weighted.open_scorer(parts=parts)


def test_a_part_that_never_ends_keeps_no_process_from_ending() -> None:
    script = """
import threading
from contextlib import ExitStack
from retrain import BatchScorer
from retrain.plugins.rewards.opening import RewardRange
from retrain.plugins.rewards.weighted import OpenPart, WeightedScorer

begun = threading.Event()

class Endless(BatchScorer):
    def score_all(self, answers):
        begun.set()
        threading.Event().wait()

WeightedScorer([OpenPart(1.0, Endless(), RewardRange("endless"), "a")], ExitStack()).score_all([]).close()
begun.wait()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_functions_are_called_by_whoever_asks_so_that_they_may_use_signals() -> None:
    parts = {f"{FUNCTIONS}.in_main_thread": 1.0, "match": 1.0}
    assert weighted.score("237", PROMPT, parts=parts) == 2.0


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (
            [Score(0.0, is_over_limit=True), Score(None, Outcome.ERROR, "y")],
            Score(None, Outcome.ERROR, "y", is_over_limit=True),
        ),
        ([Score(0.5, Outcome.TIMEOUT, "x"), Score(1.0, Outcome.FAULT, "y")], Score(1.5, Outcome.FAULT, "y")),
        (
            [Score(0.5, is_over_limit=True), Score(0.0, Outcome.TIMEOUT, "y")],
            Score(0.5, Outcome.TIMEOUT, "y", is_over_limit=True),
        ),
        ([Score(0.5), Score(1.0)], Score(1.5)),
    ],
)
def test_the_sum_has_the_outcome_that_matters_most(scores: list[Score], expected: Score) -> None:
    class Given(BatchScorer):
        def __init__(self, score: Score) -> None:
            self.score = score

        async def score_all(self, answers: Sequence[Answer]) -> list[Score]:
            return [self.score]

    parts = [OpenPart(1.0, Given(score), RewardRange("given"), f"part_{n}") for n, score in enumerate(scores)]
    scorer = WeightedScorer(parts, ExitStack())
    parts_seen = {f"part_{n}": score.value for n, score in enumerate(scores)}
    assert asyncio.run(scorer.score_all([Answer("", PROMPT)])) == [replace(expected, parts=parts_seen)]
