"""`retrain compare --per --over`: at equal amounts of what was spent, and said over what."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from retrain.base.errors import ConfigError
from retrain.campaign.run import start
from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from retrain.records.run_state import read_start
from retrain.records.windows import Window
from retrain.results.report.compare import Outcome
from retrain.results.report.gather import gather
from retrain.results.report.tables import excluded, footnotes
from tests.extras.test_compare import SPREAD, compared, decided
from tests.simulated import Simulated, write_campaign

Call = Callable[..., CompletedProcess[str]]
STEPS = 40


def learns(per_step: float, tokens: int, noise: float = 0.0, steps: int = STEPS) -> Simulated:
    """A run whose reward rises by as much in each step, and which samples so many tokens for it."""
    return Simulated(
        [min(1.0, per_step * step + noise) for step in range(1, steps + 1)],
        more=lambda step: {"tokens_per_step": tokens},
    )


def dear_and_cheap(directory: Path) -> Path:
    """`dear` learns 1.5 times as much in a step as `cheap`, for twice the tokens."""
    runs = {("cheap", seed): learns(0.01, 100, x) for seed, x in enumerate(SPREAD)}
    return write_campaign(
        directory, runs | {("dear", seed): learns(0.015, 200, 0.5 * x) for seed, x in enumerate(SPREAD)}
    )


def test_who_is_better_per_step_may_be_worse_at_equal_cost(tmp_path):
    directory = dear_and_cheap(tmp_path)
    (by_step,) = compared(directory, metrics=["mean_reward"], window=Window("steps", 0, 20)).metrics
    noise = 0.5 * sum(SPREAD) / 4
    assert by_step.differences[0].outcome == Outcome.HIGHER
    assert by_step.differences[0].difference.difference == pytest.approx(0.005 * 21 / 2 - noise)
    (by_token,) = compared(directory, metrics=["mean_reward"], window=Window("tokens", 0, 2000)).metrics
    assert by_token.differences[0].outcome == Outcome.LOWER  # after ten steps of `dear`, twenty of `cheap`
    assert by_token.differences[0].difference.difference == pytest.approx(
        0.015 * 11 / 2 - 0.01 * 21 / 2 - noise
    )
    assert "cheap came there in 20 steps, dear 10" in list(excluded(by_token))
    assert by_token.how == "mean over the first 2,000 sampled tokens"


def test_conditions_that_spent_differently_are_compared_where_all_come_to(tmp_path):
    (metric,) = compared(
        dear_and_cheap(tmp_path), metrics=["mean_reward"], window=Window("tokens", 0)
    ).metrics
    assert metric.window == Window("tokens", 0, 4000)
    assert metric.differences[0].outcome == Outcome.LOWER
    assert metric.cut_off.startswith(
        "finished runs end at 4,000 to 8,000 sampled tokens: all are compared up"
    )


def test_different_numbers_of_steps_keep_the_last_part_of_each_without_a_verdict(tmp_path):
    runs = {("a", s): learns(0.01, 1, x, 20) for s, x in enumerate(SPREAD)}
    runs |= {("b", s): learns(0.01, 1, x, 40) for s, x in enumerate(SPREAD)}
    directory = write_campaign(tmp_path, runs)
    (last,) = compared(directory, metrics=["mean_reward"]).metrics
    (whole,) = compared(directory, metrics=["mean_reward"], window=Window(start=0)).metrics
    outcomes = [metric.differences[0].outcome for metric in (last, whole)]
    assert outcomes == [Outcome.OTHER_STEPS, Outcome.IDENTICAL]
    assert whole.how == "mean over steps 1 to 20"


def test_a_condition_without_the_axis_is_named_with_what_to_do(tmp_path):
    priced = {"more": lambda step: {"cost_usd": 0.5}}
    runs = {("priced", s): Simulated([0.5] * 20, **priced) for s in range(3)}
    runs |= {("free", s): Simulated([0.5] * 20, **(priced if s else {})) for s in range(3)}
    with pytest.raises(
        ConfigError, match=r"--per usd: rows of free \(1 of 3 runs\) have no cost_usd: .*prices"
    ):
        compared(write_campaign(tmp_path, runs), window=Window("usd", 0, 5))


@pytest.mark.parametrize("window", [Window("tokens", 0, 20), Window(end=10), Window(last=3)])
def test_a_verdict_of_the_decision_is_of_its_own_question_only(tmp_path, window):
    directory = decided(dear_and_cheap(tmp_path), "no_difference")
    manifest = directory / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"maxrl"', '"dear"').replace('"grpo"', '"cheap"'))
    usual = compared(directory, metrics=["mean_reward"])
    assert usual.metrics[0].differences[0].is_of_decision
    assert not any("another question" in line for line in footnotes([usual]))
    other = compared(directory, metrics=["mean_reward"], window=window)
    assert not other.metrics[0].differences[0].is_of_decision
    assert sum("another question than [decision]" in line for line in footnotes([other])) == 1


def test_the_command_takes_a_window_and_json_holds_it(tmp_path, retrain: Call):
    directory = dear_and_cheap(tmp_path)
    options = ("--per", "tokens", "--over", "0:2e6", "-m", "mean_reward")
    shown = retrain("compare", directory, *options).stdout
    assert "mean over the first 4,000 sampled tokens; higher is better" in shown
    assert (
        "4 of 8 finished runs end before 2,000,000 sampled tokens: all are compared up to 4,000" not in shown
    )
    assert "8 of 8 finished runs end before 2,000,000 sampled tokens: all are compared up to 4,000" in shown
    (metric,) = json.loads(retrain("compare", directory, *options, "--json").stdout)["comparisons"][0][
        "metrics"
    ]
    assert metric["window"] == {"per": "tokens", "start": 0.0, "end": 4000.0, "last": 0}
    assert metric["cut_off"].startswith("8 of 8 finished runs end")
    assert metric["sides"][1]["steps"] == [20, 20]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--per", "token"), "--per token: no such axis"),
        (("--over", "5"), "--over 5: is no window"),
        (("--per", "tokens", "--step", "5"), "leave out --over and --per"),
        (("--per", "tokens", "--over", "9000:9999"), "cheap_s0 ends at 4,000 sampled tokens"),
    ],
)
def test_bad_windows_are_refused(tmp_path, retrain: Call, options, error):
    answer = retrain("compare", dear_and_cheap(tmp_path), *options)
    assert (answer.returncode, error in answer.stderr) == (2, True)


EVALUATED = """
[[eval]]
name = "hard"
reward = "partial"
every = 2
prompts = 3
"""


def test_what_was_found_before_training_is_told_and_in_no_window(campaign_file, retrain: Call) -> None:
    campaign_file.write_text(campaign_file.read_text() + EVALUATED)
    inline = ["campaign.launcher=inline", "campaign.parallel=false"]
    directory = start(campaign_file, inline).execute().directory
    metric = "eval_hard_reward"
    for window in (Window("steps", 0, 2), Window("steps", 0, 4), None):
        (found,) = compared(directory, metrics=[metric], window=window).metrics
        for side in found.sides:
            runs = [run for run in gather(directory).runs if run.condition == side.label]
            starts, gains = [read_start(RunFiles(run.directory)).value(metric) for run in runs], []
            for run, begun in zip(runs, starts, strict=True):
                rows = [row[metric] for row in read_metrics(run.directory) if metric in row]
                value = rows[-1] if window is None else sum(rows[: int(window.end) // 2]) / (window.end // 2)
                gains.append(value - begun)
            assert side.start == pytest.approx(sum(starts) / 2)
            assert side.gain == pytest.approx(sum(gains) / 2)
    (early,) = compared(directory, metrics=[metric], window=Window("steps", 0, 1)).metrics
    assert [side.values for side in early.sides] == [(), ()]  # no evaluation yet, whatever came before
    assert early.differences[0].by_question is None
    shown = retrain("compare", directory, "-m", metric).stdout
    assert f"before training {found.sides[0].start:.3g}; since then " in shown
