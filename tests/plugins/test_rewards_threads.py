"""Threads that score: results in order, and a count that only rises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from retrain.base.rollouts import Prompt
from retrain.plugins.rewards import Answer, Score
from retrain.plugins.rewards.threads import ThreadedScorer

ANSWERS = [Answer(str(number), Prompt(number, "?", "")) for number in range(6)]


class FunctionThreads(ThreadedScorer):
    """Scores by a function that each test sets."""

    function: Callable[[Answer], float]

    def score_one(self, answer: Answer) -> Score:
        return Score(self.function(answer))


@pytest.fixture
def scorer() -> Iterator[FunctionThreads]:
    opened = FunctionThreads(2, "test")
    yield opened
    opened.close()


def test_results_come_in_the_order_of_the_answers(scorer: FunctionThreads) -> None:
    held = threading.Event()

    def score(answer: Answer) -> float:
        if answer is ANSWERS[0]:
            held.wait()
        if answer is ANSWERS[-1]:
            held.set()
        return float(answer.completion)

    scorer.function = score
    assert [score.value for score in scorer.score_all(ANSWERS)] == list(range(6))


def test_completions_are_counted_when_they_are_done_and_over_all_calls(scorer: FunctionThreads) -> None:
    seen = []

    def score(answer: Answer) -> float:
        if answer is ANSWERS[-1]:  # its thread has done some, the other one at most holds one
            seen.append(scorer.scored)
        return 0.0

    scorer.function = score
    for _ in range(3):
        scorer.score_all(ANSWERS)
        seen.append(scorer.scored)
    assert seen[1::2] == [6, 12, 18]
    assert all(0 <= 6 * call + 5 - counted <= 1 for call, counted in enumerate(seen[::2]))


def test_after_an_exception_those_that_were_not_begun_do_not_count(scorer: FunctionThreads) -> None:
    begun = []

    def score(answer: Answer) -> float:
        begun.append(answer)
        raise ValueError(answer.completion)

    scorer.function = score
    with pytest.raises(ValueError, match="0"):
        scorer.score_all(ANSWERS)
    scorer.close()
    assert 1 <= scorer.scored <= len(begun)
