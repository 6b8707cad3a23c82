"""Windows of an axis: which rows are inside, how much each counts, and what is refused."""

from __future__ import annotations

import math

import pytest

from retrain.base.errors import ConfigError
from retrain.records.decision import mean_over
from retrain.records.windows import Window, amounts, read_window


def rows(tokens: list[float], values: list[float | None]) -> list[dict[str, object]]:
    return [
        {"step": step, "tokens_per_step": spent, "mean_reward": value}
        for step, (spent, value) in enumerate(zip(tokens, values, strict=True), 1)
    ]


def test_a_step_that_straddles_a_bound_counts_by_its_share():
    run = rows([100, 200, 300], [1.0, 2.0, 3.0])  # which end at 100, 300 and 600 tokens
    assert mean_over(run, "mean_reward", Window("tokens", 50, 400)) == pytest.approx(
        (50 * 1.0 + 200 * 2.0 + 100 * 3.0) / 350
    )


def test_a_window_inside_one_step_is_that_step():
    assert mean_over(rows([100, 200], [1.0, 2.0]), "mean_reward", Window("tokens", 150, 160)) == 2.0


def test_a_bound_between_two_steps_belongs_to_neither():
    run = rows([100, 100, 100], [1.0, 2.0, 3.0])
    assert mean_over(run, "mean_reward", Window("tokens", 100, 200)) == 2.0
    assert mean_over(run, "mean_reward", Window("steps", 1, 2)) == 2.0


def test_steps_count_equally_and_part_of_one_by_its_share():
    run = rows([1, 1, 1, 1], [1.0, 2.0, 3.0, 4.0])
    assert mean_over(run, "mean_reward", Window("steps", 0, 3)) == 2.0
    assert mean_over(run, "mean_reward", Window("steps", 0.5, 2)) == pytest.approx((0.5 + 2.0) / 1.5)


def test_a_row_without_the_metric_is_left_out_and_its_spending_counts():
    run = rows([100, 100, 200], [1.0, None, 4.0])
    assert mean_over(run, "mean_reward", Window("tokens", 0, 300)) == pytest.approx((100 * 1 + 100 * 4) / 200)


def test_a_window_without_a_value_has_none():
    assert mean_over(rows([100, 100], [1.0, None]), "mean_reward", Window("tokens", 100, 200)) is None
    assert mean_over([], "mean_reward", Window("tokens", 0, 1)) is None


@pytest.mark.parametrize(
    ("per", "spent", "reached"),
    [
        ("steps", [], [1, 2, 4]),
        ("tokens", [[5, 7, 9]], [5, 12, 21]),
        ("rollouts", [[2, 2, 3], [8, 8, 4], [math.nan, 1, 0]], [16, 40, 52]),  # groups that a refill dropped
        ("seconds", [[3, 3, 3], [math.nan, 1, 0]], [3, 5, 8]),  # without pauses of the API
        ("usd", [[0.5, 0.25, 0]], [0.5, 0.75, 0.75]),
    ],
)
def test_each_axis_adds_up_what_rows_tell(per, spent, reached):
    assert list(amounts([1, 2, 4], spent, per) or ()) == reached


@pytest.mark.parametrize("price", [math.nan, math.inf, -1.0])
def test_an_axis_of_which_a_row_does_not_tell_is_not_known(price):
    assert amounts([1, 2], [[0.1, price]], "usd") is None
    unknown = [{"step": 1, "mean_reward": 1.0, "cost_usd": None}]
    assert mean_over(unknown, "mean_reward", Window("usd", 0, 1)) is None


@pytest.mark.parametrize(("end", "first"), [(6, -3), (100, 91), (300, 271)])
def test_the_last_part_of_a_run_is_a_tenth_of_its_steps_and_ten_at_least(end, first):
    assert Window().bounds(end) == (first - 1, end)


def test_evaluations_inside_count_and_without_any_the_last_one_before():
    steps, after = range(1, 46), [9, 19, 29, 39]  # steps 10, 20, 30 and 40
    assert Window("steps", 10, 30).evaluations(steps, after) == [19, 29]
    assert Window("steps", 31, 39).evaluations(steps, after) == [29]
    assert Window("steps", 0, 5).evaluations(steps, after) == []
    assert Window().evaluations(steps, after) == [39]
    assert Window(end=25).evaluations(steps, after) == [19]
    assert Window().evaluations([], []) == []


def test_windows_are_read_as_they_are_written():
    assert read_window("tokens", "0:2e6") == read_window("tokens", [0, 2_000_000]) == Window("tokens", 0, 2e6)
    assert read_window("steps", "last") == Window()
    assert read_window("usd", "whole") == Window("usd", start=0)
    names = [str(Window("steps", 100, 200)), str(Window("tokens", 0, 2e6)), str(Window("usd", 0, 1.25))]
    assert names == ["steps 101 to 200", "the first 2,000,000 sampled tokens", "the first 1.25 dollars"]


@pytest.mark.parametrize(
    "over", ["", "3", "5:5", "9:2", "-1:5", "0:nan", "0:inf", "a:b", "1:2:3", "all", [1], [2, 1], []]
)
def test_what_is_no_window_is_refused_with_what_is(over):
    with pytest.raises(ConfigError, match=r"--over .*is no window; .*0:200, or whole, or last"):
        read_window("tokens", over)


def test_an_unknown_axis_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"--per token: .* steps, tokens, rollouts, seconds, usd"):
        read_window("token", "last")


def test_a_window_ends_where_the_shortest_run_does_and_says_so():
    window, cut_off = Window("tokens", 0, 2e6).among({"a_s0": 2.5e6, "b_s0": 1.4e6, "b_s1": 1.9e6})
    assert window == Window("tokens", 0, 1.4e6)
    assert cut_off == (
        "2 of 3 finished runs end before 2,000,000 sampled tokens: "
        "all are compared up to 1,400,000, where b_s0 ends"
    )
    assert Window("tokens", 0, 1e6).among({"a": 2e6, "b": 1.4e6}) == (Window("tokens", 0, 1e6), "")


def test_whole_and_last_are_of_what_all_runs_come_to():
    reaches = {"a": 200.0, "b": 100.0}
    assert Window("usd", start=0.0).among(reaches)[0] == Window("usd", 0, 100)
    assert Window("usd").among(reaches) == (
        Window("usd", 90, 100),
        "finished runs end at 100 to 200 dollars: all are compared up to 100, where b ends",
    )
    assert Window("usd", start=0.0).among({"a": 7.0, "b": 7.0}) == (Window("usd", 0, 7), "")


def test_a_window_that_begins_after_a_run_ended_is_refused():
    with pytest.raises(ConfigError, match=r"b_s1 ends at 50 rollouts, before the window of .* begins"):
        Window("rollouts", 60, 80).among({"a_s1": 100, "b_s1": 50})
