"""The circuit breaker pauses a campaign whose runs fail one after another, and tries one run first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.controllers.breaker import CircuitBreaker


def opened(at_s: float = 0.0, **settings: float) -> CircuitBreaker:
    breaker = CircuitBreaker(3, **{"pause_s": 10, "probation_s": 5, **settings})
    for _ in range(3):
        breaker.ended(at_s, infrastructure=True, message="no route to host")
    return breaker


def test_two_failures_in_a_row_are_bad_luck() -> None:
    breaker = CircuitBreaker(3)
    assert [breaker.ended(0, infrastructure=True) for _ in range(2)] == [False, False]
    assert not breaker.ask(0).is_open


def test_the_third_failure_in_a_row_opens_it_and_says_why() -> None:
    breaker = CircuitBreaker(3, pause_s=10)
    assert [breaker.ended(1, infrastructure=True, message="502") for _ in range(3)] == [False, False, True]
    admission = breaker.ask(1)
    assert (admission.is_open, admission.ask_again_s) == (True, 11)
    assert "3 attempts in a row" in admission.reason
    assert "502" in admission.reason


def test_any_other_ending_between_them_starts_the_count_again() -> None:
    breaker = CircuitBreaker(2)
    for infrastructure in (True, False, True):
        breaker.ended(0, infrastructure=infrastructure)
    assert not breaker.ask(0).is_open


def test_after_the_pause_one_run_is_tried_and_no_second() -> None:
    breaker = opened()
    assert not breaker.ask(10).is_open
    breaker.started(10)
    assert (breaker.ask(11).is_open, breaker.ask(11).ask_again_s) == (True, 15)


def test_a_probe_that_fails_doubles_the_pause_up_to_the_longest() -> None:
    breaker, now, pauses = opened(longest_pause_s=30), 0.0, []
    for _ in range(4):
        again = breaker.ask(now).ask_again_s
        pauses.append(again - now)
        now = again
        breaker.started(now)
        breaker.ended(now, infrastructure=True)
    assert pauses == [10, 20, 30, 30]


def test_a_probe_that_ends_well_closes_it() -> None:
    breaker = opened()
    breaker.started(10)
    breaker.ended(11, infrastructure=False)
    assert not breaker.ask(11).is_open


def test_a_probe_that_lives_through_its_probation_closes_it() -> None:
    breaker = opened()
    breaker.started(10)
    assert breaker.ask(14.9).is_open
    assert not breaker.ask(15).is_open
    assert breaker.ended(16, infrastructure=True) is False


def test_failures_of_runs_from_before_the_pause_do_not_lengthen_it() -> None:
    breaker = opened()
    assert breaker.ended(5, infrastructure=True) is False
    assert breaker.ask(5).ask_again_s == 10


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from("asfo")), max_size=60))
def test_what_was_loaded_goes_on_like_what_was_saved(events: list[tuple[float, str]]) -> None:
    breaker, copy, now = CircuitBreaker(2), CircuitBreaker(2), 0.0
    for wait_s, event in events:
        now += wait_s
        copy.load_state_dict(breaker.state_dict())
        for one in (breaker, copy):
            if event == "s":
                one.started(now)
            elif event in "fo":
                one.ended(now, infrastructure=event == "f")
        assert copy.ask(now) == breaker.ask(now)


@given(st.integers(0, 60))
def test_it_always_admits_somebody_in_the_end(failures: int) -> None:
    breaker, now = CircuitBreaker(2, pause_s=1, longest_pause_s=8), 0.0
    for _ in range(failures):
        breaker.started(now)
        breaker.ended(now, infrastructure=True)
        now = max(now, breaker.ask(now).ask_again_s)
        assert not breaker.ask(now).is_open


@pytest.mark.parametrize("wrong", [{"threshold": 0}, {"pause_s": 0}, {"pause_s": 9, "longest_pause_s": 8}])
def test_settings_out_of_range_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{list(wrong)[-1]}: got"):
        CircuitBreaker(**wrong)  # type: ignore[arg-type]
