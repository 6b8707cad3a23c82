"""Threads that score: results in order, and a count that only rises."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from retrain.rewards import Answer
from retrain.rewards.threads import ScoringThreads
from retrain.rollouts import Prompt

ANSWERS = [Answer(str(number), Prompt(number, "?", "")) for number in range(6)]


@pytest.fixture
def threads() -> Iterator[ScoringThreads]:
    opened = ScoringThreads(2, "test")
    yield opened
    opened.close(wait=True)


def test_results_come_in_the_order_of_the_answers(threads: ScoringThreads) -> None:
    held = threading.Event()

    def score(answer: Answer) -> int:
        if answer is ANSWERS[0]:
            held.wait()
        if answer is ANSWERS[-1]:
            held.set()
        return int(answer.completion)

    assert threads.map(score, ANSWERS) == list(range(6))


def test_completions_are_counted_when_they_are_done_and_over_all_calls(threads: ScoringThreads) -> None:
    seen = []

    def score(answer: Answer) -> None:
        if answer is ANSWERS[-1]:  # its thread has done some, the other one at most holds one
            seen.append(threads.scored)

    for _ in range(3):
        threads.map(score, ANSWERS)
        seen.append(threads.scored)
    assert seen[1::2] == [6, 12, 18]
    assert all(0 <= 6 * call + 5 - counted <= 1 for call, counted in enumerate(seen[::2]))


def test_after_an_exception_those_that_were_not_begun_do_not_count(threads: ScoringThreads) -> None:
    begun = []

    def score(answer: Answer) -> None:
        begun.append(answer)
        raise ValueError(answer.completion)

    with pytest.raises(ValueError, match="0"):
        threads.map(score, ANSWERS)
    threads.close(wait=True)
    assert 1 <= threads.scored <= len(begun)
