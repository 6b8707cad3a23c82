"""When a cluster is asked, and what is said while it is silent."""

from __future__ import annotations

import threading

import pytest

from retrain.campaign.launchers.cluster import Asking


class Clock:
    """A clock that stands still until a test moves it."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def asking(clock: Clock) -> Asking:
    made = Asking("Slurm", 10, print)
    made.clock = clock
    return made


def is_due_after(asking: Asking, clock: Clock, seconds: float) -> bool:
    clock.now_s += seconds
    return asking.wait(0)


def test_the_first_question_is_due_at_once(asking: Asking) -> None:
    assert asking.wait(0)


def test_a_question_follows_another_at_the_usual_time(asking: Asking, clock: Clock) -> None:
    asking.asked()
    assert not is_due_after(asking, clock, 9.9)
    assert is_due_after(asking, clock, 0.1)


def test_whoever_hurries_waits_for_the_least_time_all_the_same(asking: Asking, clock: Clock) -> None:
    asking.asked()
    asking.hurry()
    assert not is_due_after(asking, clock, 1.9)
    assert is_due_after(asking, clock, 0.1)


def test_what_was_just_submitted_is_given_time_to_show(asking: Asking, clock: Clock) -> None:
    asking.postpone()
    assert not is_due_after(asking, clock, 1.9)


def test_a_cluster_that_is_silent_is_named_once_and_when_it_answers_again() -> None:
    said: list[str] = []
    asking = Asking("Ray", 10, said.append)
    for _ in range(3):
        asking.unanswered("no answer at x")
    for _ in range(3):
        asking.answered()
    assert len(said) == 2
    assert said[0].startswith("no answer at x; ")
    assert said[1] == "Ray answers again"


def test_a_signal_ends_the_wait() -> None:
    asking = Asking("Slurm", 1e6, print)
    asking.asked()
    threading.Timer(0.01, asking.wake).start()
    assert not asking.wait(1e5)  # or this test would time out
