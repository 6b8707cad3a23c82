"""The value of a run at its end has one definition, wherever it is shown."""

import pytest

from retrain.base.locks import hold
from retrain.records.decision import value_over
from retrain.records.layout import CampaignFiles
from retrain.records.metrics import MetricsWriter
from retrain.records.windows import Window
from retrain.results.report.gather import gather
from retrain.results.report.sides import final_value
from retrain.results.status import last_steps, survey
from retrain.results.status.watch import Watcher
from tests.simulated import Simulated, write_campaign


@pytest.mark.parametrize(("steps", "averaged"), [(6, 6), (40, 10), (300, 30), (2000, 200)])
def test_status_watch_compare_and_decision_show_the_same_mean_and_its_steps(tmp_path, steps, averaged):
    rewards = [step / steps for step in range(1, steps + 1)]
    directory = write_campaign(tmp_path, {("a", 0): Simulated(rewards)}, steps=steps)
    expected = 1 - (averaged - 1) / 2 / steps
    (campaign,) = survey(directory)
    (watched,) = Watcher(directory).refresh().campaigns
    for status in (campaign, watched.status):
        (row,) = status.runs
        assert (row.reward_mean, row.reward_steps) == (pytest.approx(expected), averaged)
        assert last_steps(status.runs) == f"last {averaged}"
        assert status.conditions[0].reward_mean == pytest.approx(expected)
    (run,) = gather(directory).runs
    assert final_value(run, "mean_reward", Window()) == pytest.approx(expected)
    files = CampaignFiles(directory).run("a_s0")
    assert value_over(files, {}, "mean_reward") == (True, pytest.approx(expected))
    there = value_over(files, {}, "mean_reward", Window(end=steps))
    assert there == (True, pytest.approx(expected))


def test_the_evaluation_at_the_end_is_not_that_of_a_window_before(tmp_path):
    """A run of 20 steps that evaluated at 4 and at its end."""
    evaluated = Simulated(
        [0.5] * 20, held_out=0.9, more=lambda step: {"eval_reward": 0.2} if step == 4 else {}
    )
    files = CampaignFiles(write_campaign(tmp_path, {("a", 0): evaluated})).run("a_s0")
    assert value_over(files, {"eval_reward": 0.9}, "eval_reward", Window(end=6)) == (True, 0.2)
    assert value_over(files, {"eval_reward": 0.9}, "eval_reward", Window(end=20)) == (True, 0.9)


def test_watching_a_long_run_keeps_its_mean_as_it_grows_and_as_it_is_resumed(tmp_path):
    directory = write_campaign(tmp_path, {("a", 0): Simulated([0.0] * 290, ending="")}, steps=400)
    files, watcher = CampaignFiles(directory).run("a_s0"), Watcher(directory)
    grown = [(1, range(291, 301), 10 / 30), (2, range(281, 282), 1 / 28), (2, range(282, 301), 20 / 30)]
    with hold(files.lock):
        watcher.refresh()
        for attempt, steps, mean in grown:  # the second attempt takes back twenty steps
            with MetricsWriter(files.metrics, attempt) as rows:
                for step in steps:
                    rows.append({"step": step, "mean_reward": 1.0, "step_time_s": 2.0})
            (watched,) = watcher.refresh().campaigns
            (row,), (seen,) = survey(directory)[0].runs, watched.status.runs
            assert seen.reward_mean == row.reward_mean == pytest.approx(mean)
            assert seen.reward_steps == row.reward_steps
