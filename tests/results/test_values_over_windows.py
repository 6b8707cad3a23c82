"""The value of a run over a window, from its columns; it is that of its rows."""

from __future__ import annotations

import json
import math
from functools import partial

import numpy as np
import pytest

from retrain.records.decision import mean_over, value_of_rows
from retrain.records.metrics import read_metrics
from retrain.records.windows import STEPS, Window
from retrain.results.report.gather import RunHistory, gather
from retrain.results.report.sides import (
    at_equal_amounts,
    averaged,
    conditions,
    describe,
    end_step,
    final_value,
    is_counted,
)
from retrain.results.status import survey
from tests.simulated import Simulated, write_campaign


def run_of(tmp_path, run: Simulated) -> RunHistory:
    return gather(write_campaign(tmp_path, {("grpo", 0): run}, steps=len(run.rewards))).runs[0]


@pytest.mark.parametrize("per", ["steps", "tokens", "rollouts", "seconds", "usd"])
def test_columns_and_rows_give_the_same_value_on_every_axis(tmp_path, per):
    rng = np.random.default_rng(0)
    costs = [
        {
            "tokens_per_step": int(rng.integers(50, 500)),
            "batch_size": int(rng.integers(1, 9)),
            "group_size": 4,
            "step_time_s": float(rng.uniform(1, 9)),
            "api_pause_s": 0.5 if step % 3 else 0.0,
            "cost_usd": float(rng.uniform(0, 0.1)),
        }
        for step in range(40)
    ]
    run = run_of(tmp_path, Simulated(rng.uniform(size=40).tolist(), more=lambda step: costs[step - 1]))
    reach = run.columns.reached(per)
    assert reach is not None
    rows = read_metrics(run.directory)
    for start, end in ((0.0, 0.3), (0.21, 0.77), (0.5, 1.0)):
        window = Window(per, start * reach[-1], end * reach[-1])
        assert final_value(run, "mean_reward", window) == pytest.approx(
            mean_over(rows, "mean_reward", window)
        )


def test_the_usual_value_is_the_mean_of_the_last_tenth_to_the_last_bit(tmp_path):
    rewards = np.random.default_rng(1).uniform(size=300)
    run = run_of(tmp_path, Simulated(rewards.tolist()))
    assert final_value(run, "mean_reward", Window()) == math.fsum(rewards[270:]) / 30
    assert final_value(run, "mean_reward", Window(end=120)) == float(np.mean(rewards[108:120]))
    assert final_value(run, "mean_reward", Window(last=40)) == float(np.mean(rewards[260:]))
    assert final_value(run, "mean_reward", Window(STEPS, 100, 200)) == float(np.mean(rewards[100:200]))


def evaluated(every: int, *, steps: int = 40, held_out: float | None = None) -> Simulated:
    """A run whose evaluation after a step is that step, over ten tokens each."""
    return Simulated(
        [0.5] * steps,
        held_out=held_out,
        more=lambda step: {"tokens_per_step": 10} | ({} if step % every else {"eval_reward": float(step)}),
    )


@pytest.mark.parametrize(
    ("window", "value"),
    [
        (Window(), 99.0),  # the end's, which is no row's
        (Window("steps", 0, 30), (10 + 20 + 30) / 3),
        (Window("steps", 10, 30), (20 + 30) / 2),
        (Window("tokens", 210, 289), 20.0),  # none inside: the last one before
        (
            Window("tokens", 210, 299),
            30.0,
        ),  # of the step that passes the end, as if the run had ended with it
        (Window("tokens", 0, 89), None),
        (Window("steps", 15, 45), None),  # which the run does not come to
        (Window("steps", 25, 44), (30 + 40 + 99) / 3),
        (Window(end=44), 99.0),
        (Window(end=43), 40.0),
    ],
)
def test_held_out_values_are_means_of_the_evaluations_inside(tmp_path, window, value):
    run = run_of(tmp_path, evaluated(10, steps=44, held_out=99.0))
    assert final_value(run, "eval_reward", window) == value
    in_rows = value_of_rows(read_metrics(run.directory), run.result, "eval_reward", window)
    assert in_rows == (is_counted(run, window), value)  # of [decision]


@pytest.mark.parametrize(
    ("window", "told"),
    [
        (Window("steps", 0, 30), "mean of the held-out evaluations over steps 1 to 30"),
        (
            Window("steps", 14, 18),
            "mean of the held-out evaluations over steps 15 to 18; 1 of 1 run made none there, and the last "
            "one before counts, at 10 steps",
        ),
        (Window("steps", 0, 9), "mean of the held-out evaluations over steps 1 to 9"),  # it has no value
        (Window(), "held-out evaluation at the end"),
        (
            Window(end=43),
            "held-out evaluation at step 43; 1 of 1 run made none there, and the last one before counts, at "
            "40 steps",
        ),
    ],
)
def test_an_evaluation_that_was_made_before_a_window_is_not_told_as_one_inside(tmp_path, window, told):
    assert describe("eval_reward", window, [run_of(tmp_path, evaluated(10, steps=44, held_out=99.0))]) == told


def test_an_evaluation_at_the_end_that_is_a_row_too_counts_once(tmp_path):
    run = run_of(tmp_path, evaluated(10, held_out=40.0))
    assert final_value(run, "eval_reward", Window("steps", 0, 40)) == (10 + 20 + 30 + 40) / 4


def test_runs_that_come_to_the_end_of_a_window_count_whatever_became_of_them(tmp_path):
    tokens = {"more": lambda step: {"tokens_per_step": 100}}
    runs = {("a", seed): Simulated([1.0] * n, ending=end, **tokens) for seed, (n, end) in enumerate(
        [(20, "done"), (9, "failed"), (10, ""), (4, "done")]
    )}  # fmt: skip
    every = gather(write_campaign(tmp_path, runs)).runs
    window = Window("tokens", 0, 1000)
    assert [is_counted(run, window) for run in every] == [True, False, True, False]
    assert [is_counted(run, Window("tokens", 0)) for run in every] == [True, False, False, True]
    assert end_step(every[0], window) == 10
    assert end_step(every[0], Window("tokens", 0, 1001)) == 11


def test_runs_are_compared_where_the_shortest_finished_one_ends(tmp_path):
    runs = {
        (name, seed): Simulated([1.0] * (10 + seed), more=lambda step, cost=cost: {"tokens_per_step": cost})
        for name, cost in (("a", 100), ("b", 200))
        for seed in range(3)
    } | {("b", 3): Simulated([1.0] * 2, ending="", more=lambda step: {"tokens_per_step": 200})}
    sides = conditions(gather(write_campaign(tmp_path, runs)))
    window, cut_off = at_equal_amounts(Window("tokens", 0, 2e3), sides)
    assert window == Window("tokens", 0, 1000)
    assert cut_off.startswith(
        "3 of 6 finished runs end before 2,000 sampled tokens: all are compared up to 1,000"
    )


def test_only_columns_of_the_axis_are_read_beside_the_metrics(tmp_path):
    directory = write_campaign(tmp_path, {("a", 0): evaluated(10)})
    (run,) = gather(directory, {"mean_reward", "tokens_per_step"}).runs
    assert set(run.columns.metrics) == {"mean_reward", "tokens_per_step"}
    assert json.dumps(list(run.columns.reached("tokens") or ())[:3]) == "[10.0, 20.0, 30.0]"


@pytest.mark.parametrize(
    "window", [Window("steps", 4, 30), Window("steps", 0.0), Window("tokens", 0, 299)], ids=str
)
def test_status_and_compare_average_over_the_same_part_of_each_run(tmp_path, window):
    runs = {("grpo", 0): evaluated(10, steps=40, held_out=99.0), ("grpo", 1): evaluated(10, steps=30)}
    directory = write_campaign(tmp_path, runs, steps=40)
    sides = conditions(gather(directory))
    shared, cut_off = at_equal_amounts(window, sides)
    (found,) = survey(directory, average=partial(averaged, window))
    assert (found.over, found.over_note) == (shared, cut_off)
    for run, row in zip(sides[0].runs, found.runs, strict=True):
        assert row.reward_mean == final_value(run, "mean_reward", shared)
        assert row.eval_reward == final_value(run, "eval_reward", shared)


def test_status_tells_that_an_axis_or_a_window_is_not_there(tmp_path):
    directory = write_campaign(tmp_path, {("grpo", 0): evaluated(10)}, steps=40)
    (unpriced,), (late,) = (
        survey(directory, average=partial(averaged, w)) for w in (Window("usd", 0.0), Window("steps", 50, 60))
    )
    assert "have no cost_usd" in unpriced.over_note
    assert unpriced.runs[0].reward_mean is None
    assert "before the window of steps 51 to 60 begins" in late.over_note
    assert late.runs[0].reward_mean is None
