"""`retrain report --per`: learning along what was spent, and the comparison over the same window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from retrain.records.windows import Window
from retrain.results.report.contents import contents
from retrain.results.report.curves import Bins, bins_for, curve, packed
from retrain.results.report.gather import gather
from retrain.results.report.page import page
from tests.simulated import Simulated, side, write_campaign

Call = Callable[..., CompletedProcess[str]]


def spends(tokens: Sequence[int], rewards: Sequence[float], **more: Any) -> Simulated:
    return Simulated(rewards, more=lambda step: {"tokens_per_step": tokens[step - 1]}, **more)


@pytest.mark.parametrize(
    ("bins", "places", "means"),
    [
        (Bins(100, 4, 400, "tokens"), [50, 150, 250, 350], [1, 3, 3, 3]),  # the second step covers three
        (Bins(200, 2, 400, "tokens"), [100, 300], [(100 * 1 + 100 * 3) / 200, 3]),
        (Bins(300, 2, 600, "tokens"), [150, 350], [(100 * 1 + 200 * 3) / 300, 3]),  # which ends inside one
    ],
)
def test_a_bin_is_the_mean_of_the_steps_that_it_covers(tmp_path, bins, places, means):
    found = curve(side(tmp_path, spends([100, 300], [1.0, 3.0])), "mean_reward", bins)
    assert found.steps.tolist() == places
    assert found.mean == pytest.approx(means)


def test_seeds_that_spend_differently_share_a_grid(tmp_path):
    fast, slow = spends([100] * 4, [1.0, 2.0, 3.0, 4.0]), spends([200] * 2, [5.0, 7.0])
    found = curve(side(tmp_path, fast, slow), "mean_reward", Bins(100, 4, 400, "tokens"))
    assert found.seeds.tolist() == [2, 2, 2, 2]
    assert found.mean == pytest.approx([3.0, 3.5, 5.0, 5.5])


def evaluated(tokens: int, *steps: int) -> Simulated:
    """A run whose evaluation after a step is a hundredth of its number."""
    return Simulated(
        [0.0] * 20,
        more=lambda step: (
            {"tokens_per_step": tokens} | ({"eval_reward": step / 100} if step in steps else {})
        ),
    )


def test_between_evaluations_is_a_line_from_the_first_to_the_last(tmp_path):
    found = curve(side(tmp_path, evaluated(10, 7, 17)), "eval_reward", Bins(50, 4, 200, "tokens"))
    assert found.steps.tolist() == [(70 + 100) / 2, 125, (150 + 170) / 2]
    assert found.mean == pytest.approx([0.085, 0.125, 0.16])


def test_one_evaluation_stands_where_it_was_made(tmp_path):
    found = curve(side(tmp_path, evaluated(10, 7)), "eval_reward", Bins(50, 4, 200, "tokens"))
    assert (found.steps.tolist(), found.mean.tolist()) == ([70.0], [0.07])


def test_seeds_that_are_evaluated_at_different_amounts_have_a_mean_over_all(tmp_path):
    both = side(tmp_path, evaluated(10, 5, 10), evaluated(8, 5, 10))  # at 50 and 100, and at 40 and 80 tokens
    found = curve(both, "eval_reward", Bins(20, 10, 200, "tokens"))
    assert found.seeds.tolist() == [1, 2, 2, 1]
    assert found.mean[1] == pytest.approx((0.055 + 50 / 800) / 2)


def test_a_run_that_does_not_tell_the_axis_has_no_curve(tmp_path):
    both = side(tmp_path, Simulated([1.0] * 4), spends([100] * 4, [0.5] * 4))
    found = curve(both, "mean_reward", bins_for([both], 1, "tokens"))
    assert found.seeds.tolist() == [1, 1, 1, 1]
    assert found.steps.tolist() == [50, 150, 250, 350]


def test_small_amounts_keep_their_places(tmp_path):
    cents = Simulated([1.0] * 4, more=lambda step: {"cost_usd": 0.000125})
    shown = side(tmp_path, cents)
    assert packed(curve(shown, "mean_reward", bins_for([shown], 1, "usd")))["s"] == [
        0.0000625, 0.0001875, 0.0003125, 0.0004375,
    ]  # fmt: skip


def dear_and_cheap(directory: Path) -> Path:
    runs = {(name, seed): spends([tokens] * 20, [(seed + step) / 40 for step in range(20)])
            for name, tokens in (("cheap", 100), ("dear", 200)) for seed in range(3)}  # fmt: skip
    return write_campaign(directory, runs)


def test_learning_is_drawn_and_compared_along_the_axis(tmp_path):
    campaign = gather(dear_and_cheap(tmp_path))
    shown = contents(campaign, window=Window("tokens", 0, 1000))
    (learned,) = shown.sections["learning"]
    x = learned.spec["encoding"]["x"]
    assert (x["title"], x["scale"]["domainMax"]) == ("sampled tokens", 4000)
    assert shown.comparison.metrics[0].how == "mean over the first 1,000 sampled tokens"
    assert "mean over the first 1,000 sampled tokens" in page(shown)
    (usual,) = contents(campaign).sections["learning"]
    assert usual.spec["encoding"]["x"]["title"] == "step"


def test_the_command_takes_the_axis_and_refuses_one_that_is_not_known(tmp_path, retrain: Call):
    directory = dear_and_cheap(tmp_path)
    target = tmp_path / "report.html"
    answer = retrain("report", directory, "-o", target, "--per", "tokens", "--over", "0:2e3")
    assert (answer.returncode, "mean over the first 2,000 sampled tokens" in target.read_text()) == (0, True)
    refused = retrain("report", directory, "-o", target, "--per", "usd")
    assert refused.returncode == 2
    assert "--per usd: rows of cheap (3 of 3 runs), dear (3 of 3 runs) have no cost_usd" in refused.stderr
