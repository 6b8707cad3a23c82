"""The circuit breaker pauses a campaign whose runs fail one after another, and tries one run first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.control.rules.breaker import LONGEST_PAUSE_S, PAUSE_S, PROBATION_S, CircuitBreaker


def opened() -> CircuitBreaker:
    """Return a breaker that opened at second 0."""
    breaker = CircuitBreaker(3)
    for run in ("early", "later", "last"):
        breaker.ended(0, run, infrastructure=True, message="no route to host")
    return breaker


def pauses_until(breaker: CircuitBreaker, end_s: float) -> bool:
    """Whether it admits nobody before a time, and one run as a probe then."""
    return breaker.ask(end_s - 0.1).is_open and breaker.ask(end_s).is_probe


def start_probe(breaker: CircuitBreaker, now_s: float) -> None:
    breaker.launched("probe")
    breaker.started(now_s, "probe")


def test_two_failures_in_a_row_are_bad_luck() -> None:
    breaker = CircuitBreaker(3)
    for run in "ab":
        breaker.ended(0, run, infrastructure=True)
    assert not breaker.ask(0).is_open


def test_the_third_failure_in_a_row_opens_it_and_says_why() -> None:
    breaker = CircuitBreaker(3)
    for run in "abc":
        breaker.ended(1, run, infrastructure=True, message="502")
    admission = breaker.ask(1)
    assert admission.is_open
    assert pauses_until(breaker, 1 + PAUSE_S)
    assert "3 attempts in a row" in admission.reason
    assert "502" in admission.reason


def test_any_other_ending_between_them_starts_the_count_again() -> None:
    breaker = CircuitBreaker(2)
    for run, infrastructure in (("a", True), ("b", False), ("c", True)):
        breaker.ended(0, run, infrastructure=infrastructure)
    assert not breaker.ask(0).is_open


def test_after_the_pause_one_run_is_tried_and_no_second() -> None:
    breaker = opened()
    assert not breaker.ask(PAUSE_S).is_open
    start_probe(breaker, PAUSE_S)
    assert breaker.ask(PAUSE_S + 1).is_open


def test_a_probe_that_fails_doubles_the_pause_up_to_the_longest() -> None:
    breaker, now_s = opened(), PAUSE_S
    for pause_s in (120, 240, 480, 960, LONGEST_PAUSE_S, LONGEST_PAUSE_S):
        start_probe(breaker, now_s)
        breaker.ended(now_s, "probe", infrastructure=True)
        assert pauses_until(breaker, now_s + pause_s)
        now_s += pause_s


def test_a_probe_that_ends_well_closes_it() -> None:
    breaker = opened()
    start_probe(breaker, PAUSE_S)
    breaker.ended(PAUSE_S + 1, "probe", infrastructure=False)
    assert not breaker.ask(PAUSE_S + 1).is_open


def test_a_probe_that_lives_through_its_probation_closes_it() -> None:
    breaker = opened()
    start_probe(breaker, PAUSE_S)
    assert breaker.ask(PAUSE_S + PROBATION_S - 0.1).is_open
    assert not breaker.ask(PAUSE_S + PROBATION_S).is_open
    breaker.ended(PAUSE_S + PROBATION_S + 1, "probe", infrastructure=True)
    assert not breaker.ask(PAUSE_S + PROBATION_S + 1).is_open


def test_a_probe_that_waits_in_a_queue_has_shown_nothing_yet() -> None:
    breaker, begins_s = opened(), PAUSE_S + 10 * PROBATION_S
    breaker.launched("probe")
    breaker.started(begins_s - 1, "another")
    assert breaker.ask(begins_s).is_open
    breaker.started(begins_s, "probe")
    assert breaker.ask(begins_s + PROBATION_S - 0.1).is_open
    assert not breaker.ask(begins_s + PROBATION_S).is_open


def test_a_probe_that_was_cancelled_leaves_its_place_to_another() -> None:
    breaker = opened()
    breaker.launched("cancelled")
    breaker.withdrawn("another")
    assert breaker.ask(PAUSE_S + 1).is_open
    breaker.withdrawn("cancelled")
    assert breaker.ask(PAUSE_S + 1).is_probe


def test_failures_of_runs_from_before_the_pause_do_not_lengthen_it() -> None:
    breaker = opened()
    breaker.ended(5, "early", infrastructure=True)
    assert pauses_until(breaker, PAUSE_S)


def test_a_failure_of_another_run_is_not_the_probes() -> None:
    breaker = opened()
    start_probe(breaker, PAUSE_S)
    breaker.ended(PAUSE_S + 1, "early", infrastructure=True)
    assert breaker.ask(PAUSE_S + 2).reason.startswith("one run is probing")
    breaker.ended(PAUSE_S + 3, "probe", infrastructure=True)
    assert pauses_until(breaker, PAUSE_S + 3 + 2 * PAUSE_S)


def test_a_probe_counts_though_it_failed_in_the_pause() -> None:
    breaker = opened()
    breaker.ended(5, "probe", infrastructure=True)
    start_probe(breaker, PAUSE_S)
    breaker.ended(PAUSE_S + 1, "probe", infrastructure=True, is_lost=True, message="no room")
    assert "no room" in breaker.ask(PAUSE_S + 1).reason
    assert pauses_until(breaker, PAUSE_S + 1 + 2 * PAUSE_S)


def test_one_run_that_fails_again_and_again_is_no_sign_of_trouble_for_all() -> None:
    breaker = CircuitBreaker(3)
    for _ in range(10):
        breaker.ended(0, "a", infrastructure=True)
    assert not breaker.ask(0).is_open


def test_a_run_that_is_withdrawn_is_neither_failure_nor_success() -> None:
    breaker = CircuitBreaker(3)
    for run in "ab":
        breaker.ended(0, run, infrastructure=True)
    breaker.withdrawn("d")
    breaker.ended(0, "c", infrastructure=True)
    assert breaker.ask(0).is_open


def test_without_a_threshold_it_never_opens() -> None:
    breaker = CircuitBreaker(0)
    for number in range(10):
        breaker.ended(0, str(number), infrastructure=True)
    assert not breaker.ask(0).is_open


@pytest.mark.parametrize(("apart_s", "opens"), [(5.0, False), (31.0, True)])
def test_runs_that_are_lost_with_one_machine_count_as_one(apart_s: float, opens: bool) -> None:
    breaker, now_s = CircuitBreaker(3, same_loss_s=30.0), 0.0
    for run in "abc":
        breaker.ended(now_s, run, infrastructure=True, is_lost=True)
        now_s += apart_s  # their leases run out one after the other
    assert breaker.ask(now_s).is_open is opens


def test_workers_that_fail_by_themselves_beside_a_lost_machine_count_each() -> None:
    breaker = CircuitBreaker(3, same_loss_s=30.0)
    for run in "abc":
        breaker.ended(0, run, infrastructure=True, is_lost=run == "a")
    assert breaker.ask(0).is_open


@given(st.integers(0, 60))
def test_it_always_admits_somebody_in_the_end(failures: int) -> None:
    breaker, now = CircuitBreaker(2), 0.0
    for _ in range(failures):
        start_probe(breaker, now)
        breaker.ended(now, "probe", infrastructure=True)
        now += LONGEST_PAUSE_S
        assert not breaker.ask(now).is_open
