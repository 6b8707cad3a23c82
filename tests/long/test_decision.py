"""Campaigns that add seeds until it is known which conditions differ, and then stop."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.base.errors import EXIT_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, EXIT_RUN_FAILED, ConfigError
from retrain.campaign import Observer
from retrain.campaign.orchestrate import CampaignOutcome
from retrain.campaign.run import reopen, start
from retrain.config.load import load_config
from retrain.control.rules.sequential import rising_errors, weights_of_error
from retrain.plan.build import plan_runs
from retrain.plan.decidable import undecidable
from retrain.plan.decision import DecisionProgress, decide
from retrain.plan.expected_seeds import Most, ends_too_early, expected_seeds
from retrain.plan.matrix import Plan
from retrain.plan.preflight import preflight
from retrain.records.decision import Decision, lines_of
from retrain.records.layout import CampaignFiles
from retrain.records.lines import append_line
from retrain.records.manifest import read_manifest
from retrain.records.run_state import RunState, begin_attempt, end_attempt
from retrain.records.text import about
from retrain.results.status import survey

DECISION = """
[training]
batch_size = 2
group_size = 4
max_tokens = 4
temperature = 1.0
lr = 1e-3

[data]
task = "successor"
eval_prompts = 4

[reward]
reward = "tests.reward_functions.spelled"

[decision]
metric = "mean_reward"
max_seeds = 8

[campaign]
seeds = [5, 7]
max_steps = 2
launcher = "inline"

[[campaign.conditions]]
name = "plain"

[[campaign.conditions]]
name = "bonus"
reward.params.bonus = 0.5

[[campaign.conditions]]
name = "alike"
training.temperature = 1.001
"""
NEARLY_ALL = [0.05, 0.04, 0.06, 0.03, 0.05, 0.02, -0.01]  # better by six of seven seeds
SEEDS = (5, 7, 8, 9, 10, 11, 12, 13)  # those given, then counted on


@pytest.fixture
def decision_file(here: Path) -> Path:
    """A file of three conditions, of which one differs from the reference."""
    path = here / "decision.toml"
    path.write_text(DECISION)
    return path


def planned(path: Path, *overrides: str) -> Plan:
    return plan_runs(load_config(path, overrides), path.name)


def progress(
    plan: Plan,
    values: Mapping[str, Sequence[float | None]],
    *,
    is_spent: bool = False,
    begun: Collection[str] = (),
    seconds: Mapping[str, float] | None = None,
) -> DecisionProgress:
    """Return the progress after these values of each condition, in the order of the seeds."""
    runs = {(run.condition, run.seed): run.run_id for run in plan.runs}
    ended = {
        runs[name, seed]: value
        for name, found in values.items()
        for seed, value in zip(plan.seeds, found, strict=False)
    }
    assert plan.decision is not None
    return decide(plan, plan.decision, ended, {*ended, *begun}, is_spent=is_spent, seconds=seconds)


def verdicts(decision: Decision) -> dict[str, tuple[str, int]]:
    return {one.condition: (one.verdict, one.seeds) for one in decision.conditions}


def decision_of(directory: Path) -> Decision:
    manifest = read_manifest(CampaignFiles(directory).manifest)
    assert manifest is not None
    assert manifest.decision is not None
    return manifest.decision


def test_the_plan_has_all_runs_that_may_be_needed(decision_file: Path) -> None:
    plan = planned(decision_file)
    assert (plan.seeds, len(plan.runs)) == (SEEDS, 24)


def test_three_seeds_come_first_then_one_at_a_time_for_open_conditions(decision_file: Path) -> None:
    plan = planned(decision_file)
    assert progress(plan, {}).wanted == {f"{c}_s{s}" for c in plan.conditions for s in SEEDS[:3]}
    values = {"plain": [0.1, 0.2, 0.3], "bonus": [0.6, 0.7, 0.8], "alike": [0.1, 0.2, 0.3]}
    found = progress(plan, values)
    assert verdicts(found.decision) == {"bonus": ("continue", 3), "alike": ("no_difference", 3)}
    assert found.wanted - progress(plan, {}).wanted == {"plain_s9", "bonus_s9"}


def test_a_verdict_stands_although_further_seeds_ended(decision_file: Path) -> None:
    plan = planned(decision_file)
    values = {"plain": [0.0] * 8, "bonus": [0.5, 0.6, 0.55, 0.52, 0.57, 0.58, 0.51, -9.0], "alike": [0.0] * 8}
    found = progress(plan, values).decision
    assert verdicts(found) == {"bonus": ("better", 7), "alike": ("no_difference", 3)}
    assert (found.ended, found.runs, found.saved_runs) == ("decided", 17, 7)


def test_less_is_better_in_a_time(decision_file: Path) -> None:
    plan = planned(decision_file, "decision.metric=step_time_s")
    values = {"plain": [0.0] * 8, "bonus": [0.5, 0.6, 0.55, 0.52, 0.57, 0.58, 0.51], "alike": [0.0] * 8}
    assert verdicts(progress(plan, values).decision)["bonus"] == ("worse", 7)


def test_of_a_metric_of_which_neither_direction_is_better_a_verdict_tells_the_direction(
    decision_file: Path,
) -> None:
    plan = planned(decision_file, "decision.metric=entropy", "decision.rungs=[1, 2]", "decision.max_seeds=12")
    values = {"plain": [0.0] * 12, "bonus": [0.5 + i / 100 for i in range(12)], "alike": [0.0] * 12}
    runs = {(run.condition, run.seed): run.run_id for run in plan.runs}
    ended = {
        f"{runs[name, seed]}@{rung}": value
        for rung in (1, 2)
        for name, found in values.items()
        for seed, value in zip(plan.seeds, found, strict=True)
    }
    assert plan.decision is not None
    found = decide(plan, plan.decision, ended, ended, is_spent=False)
    assert lines_of(found.decision)[0].startswith("bonus: higher than plain in entropy over ")
    assert found.over["bonus_s5"] == "stopped at step 1: higher than plain"


def test_a_seed_that_failed_is_left_out(decision_file: Path) -> None:
    plan = planned(decision_file)
    values = {"plain": [0.0] * 8, "bonus": [0.5, None, 0.55, 0.52, 0.57, 0.58, 0.6, 0.5], "alike": [0.0] * 8}
    assert verdicts(progress(plan, values).decision)["bonus"] == ("better", 7)


def test_used_up_seeds_leave_a_condition_undecided(decision_file: Path) -> None:
    plan = planned(decision_file, "decision.smallest_difference=0.001")
    wide = [1.0, -0.9, 0.9, -0.6, 0.8, -0.6, 0.9, -0.5]
    found = progress(plan, {"plain": [0.0] * 8, "bonus": wide, "alike": wide}).decision
    assert verdicts(found) == {"bonus": ("undecided", 8), "alike": ("undecided", 8)}
    assert found.ended == "seeds"


@pytest.mark.parametrize(("seeds", "is_spent"), [(7, True), (8, False)])
def test_the_last_look_spends_the_error_that_is_left(decision_file: Path, seeds: int, is_spent: bool) -> None:
    """Whether the budget ends the rounds or a failed run leaves a seed fewer than planned."""
    plan = planned(decision_file, "decision.budget=1h", "decision.max_seeds=8")
    wide: list[float | None] = [0.9, 0.05, 0.6, 0.2, 0.5, 0.1, 0.8, None]
    none = [0.0] * seeds
    values = {"plain": none, "bonus": wide[:seeds], "alike": none}
    found = progress(plan, values, is_spent=is_spent).decision
    assert verdicts(found)["bonus"] == ("better", 7)
    assert found.ended == ("budget" if is_spent else "decided")


@pytest.mark.parametrize("max_seeds", [7, 8])
def test_a_condition_that_is_found_leaves_its_error_to_the_others(
    decision_file: Path, max_seeds: int
) -> None:
    """By Holm's procedure: six equal signs are too few for two comparisons, and enough for one.

    With a seed more planned, the budget ends the rounds.
    """
    plan = planned(decision_file, "decision.budget=1h", f"decision.max_seeds={max_seeds}")
    far = [0.9, 0.05, 0.6, 0.2, 0.5, 0.1, 0.8]
    values = {"plain": [0.0] * 7, "bonus": far, "alike": NEARLY_ALL}
    found = progress(plan, values, is_spent=max_seeds > 7).decision
    assert verdicts(found) == {"bonus": ("better", 7), "alike": ("better", 7)}
    alone = progress(plan, {**values, "bonus": [0.5, -0.5] * 3 + [0.5]}, is_spent=max_seeds > 7).decision
    assert verdicts(alone)["alike"][0] == "undecided"


def test_a_difference_found_with_the_others_error_has_an_interval_on_its_side(decision_file: Path) -> None:
    plan = planned(decision_file, "decision.max_seeds=7")
    values = {"plain": [0.0] * 7, "bonus": [0.5, 0.6, 0.55, 0.52, 0.57, 0.58, 0.51], "alike": NEARLY_ALL}
    (_, alike) = progress(plan, values).decision.conditions
    assert (alike.verdict, alike.low) == ("better", 0.0)
    assert alike.high is not None
    assert alike.high > 0.06


def test_shares_that_grow_keep_the_error(decision_file: Path) -> None:
    """Of all signs of a condition's differences, which has half of the error until another one is found."""
    settings = ["max_seeds=7", "error=0.2", "smallest_difference=1e-9"]  # so that none is given up
    plan = planned(decision_file, *(f"decision.{one}" for one in settings))
    sizes = np.array([0.32, 0.29, 0.31, 0.29, 1.29, 1.03, 4.14])
    late = [0.05, 0.9, -0.1, 0.8, 0.1, 0.7, 0.9]
    false = []
    for signs in itertools.product((1.0, -1.0), repeat=6):  # the reverse of a pattern is found alike
        values = {"plain": [0.0] * 7, "bonus": late, "alike": [*(sizes[:-1] * signs), sizes[-1]]}
        found = verdicts(progress(plan, values).decision)
        assert found["bonus"] == ("better", 7)
        false.append(found["alike"][0] in ("better", "worse"))
    assert 0.15 < np.mean(false) <= 0.2


def auto(path: Path, *overrides: str) -> Plan:
    return planned(path, "decision.allocate=auto", *overrides)


def test_the_next_seed_goes_where_a_difference_is_likely_and_cheap(decision_file: Path) -> None:
    plan = auto(decision_file)
    wide = [0.9, 0.05, 0.6]  # may be by chance
    values = {"plain": [0.0] * 3, "bonus": [0.5, 0.6, 0.55], "alike": wide}
    first = progress(plan, values, is_spent=False)
    assert verdicts(first.decision) == {"bonus": ("continue", 3), "alike": ("continue", 3)}
    assert first.wanted - progress(plan, {}).wanted == {"plain_s9", "bonus_s9"}
    costly = progress(plan, values, seconds={"plain": 1.0, "bonus": 1000.0, "alike": 1.0})
    assert costly.wanted - progress(plan, {}).wanted == {"plain_s9", "alike_s9"}


def test_a_round_that_had_begun_is_ended_first(decision_file: Path) -> None:
    plan = auto(decision_file)
    values = {"plain": [0.0] * 3, "bonus": [0.5, 0.6, 0.55], "alike": [0.9, 0.05, 0.6]}
    found = progress(plan, values, begun={"alike_s9"})
    assert found.wanted - progress(plan, {}).wanted == {"plain_s9", "alike_s9"}
    found = progress(plan, values, begun={"plain_s9"})  # killed before the condition's own run began
    assert found.wanted - progress(plan, {}).wanted == {"plain_s9", "bonus_s9"}


def test_workers_that_would_idle_get_the_next_likeliest(decision_file: Path) -> None:
    plan = auto(decision_file, "campaign.parallel=true", "campaign.max_workers=3", "campaign.launcher=local")
    values = {"plain": [0.0] * 3, "bonus": [0.5, 0.6, 0.55], "alike": [0.9, 0.05, 0.6]}
    assert progress(plan, values).wanted - progress(plan, {}).wanted == {"plain_s9", "bonus_s9", "alike_s9"}


def test_a_budget_gives_no_last_look_to_what_was_allocated_by_values(decision_file: Path) -> None:
    overrides = "decision.budget=1h", "decision.max_seeds=8"
    values = {"plain": [0.0] * 7, "bonus": [0.1, 0.1, 0.4, 0.1, 0.1, 0.3, 0.6], "alike": [0.0] * 3}
    equal = progress(planned(decision_file, *overrides), {**values, "alike": [0.0] * 7}, is_spent=True)
    assert verdicts(equal.decision)["bonus"] == ("better", 7)
    found = progress(auto(decision_file, *overrides), values, is_spent=True).decision
    assert (found.ended, verdicts(found)["bonus"]) == ("budget", ("undecided", 7))


def test_the_error_goes_where_the_first_differences_are_large_of_either_sign(decision_file: Path) -> None:
    plan = auto(decision_file)
    large, small = [0.5, 0.6, 0.55, 0.58, 0.52, 0.57], [0.21, 0.25, 0.22, 0.24, 0.23, 0.2]
    values = {"plain": [0.0] * 6, "bonus": small, "alike": large}
    found = verdicts(progress(plan, values).decision)
    assert found == {"alike": ("better", 6), "bonus": ("better", 6)}  # which then has all of the error
    other = {**values, "alike": [large[0], *(-x for x in large[1:])]}  # not to be found, and has the error
    assert verdicts(progress(plan, other).decision)["bonus"] == ("no_difference", 3)


def test_the_least_error_may_be_shared(decision_file: Path) -> None:
    plan = auto(decision_file, "decision.error=1e-9", "decision.max_seeds=100")
    values = {"plain": [0.0] * 3, "bonus": [0.5, 0.6, 0.4], "alike": [1e-6, 2e-6, 1e-6]}
    assert verdicts(progress(plan, values).decision)["alike"] == ("no_difference", 3)


def test_equal_values_share_the_error_equally() -> None:
    weights = weights_of_error({"a": np.zeros(3), "b": np.zeros(2)})
    assert weights["a"] == weights["b"] > 0


@given(st.floats(1e-300, 1))
def test_a_share_is_rounded_down_to_one_of_few(share: float) -> None:
    low, *later = rising_errors(0.05, share)
    assert low <= max(0.05 * share, 0.05 * 2**-30) * (1 + 1e-9)
    assert low > 0.95 * 0.05 * share
    assert [low, *later] == sorted(rising_errors(0.05, 1e-300))[-len(later) - 1 :]


def test_a_condition_whose_first_runs_failed_stays_open(decision_file: Path) -> None:
    first = {"a": np.ones(3), "b": np.zeros(0), "c": np.full(3, 0.1)}
    weights = weights_of_error(first)
    assert weights["b"] == weights["c"] < weights["a"]
    values = {"plain": [0.0] * 3, "bonus": [0.5, 0.6, 0.55], "alike": [None, None, 0.1]}
    found = progress(auto(decision_file), values)
    assert verdicts(found.decision)["alike"] == ("continue", 1)


def test_a_campaign_that_allocates_comes_to_verdicts(decision_file: Path) -> None:
    outcome = start(decision_file, ["decision.allocate=auto"]).execute()
    found = decision_of(outcome.directory)
    assert (found.ended, verdicts(found)["bonus"]) == ("decided", ("better", 6))
    (status,) = survey(outcome.directory)
    assert len(status.runs) == found.runs


def test_no_round_begins_after_the_budget(decision_file: Path) -> None:
    plan = planned(decision_file, "decision.budget=1h")
    values = {"plain": [0.1, 0.2, 0.3], "bonus": [0.6, 0.7, 0.8], "alike": [0.1, 0.2, 0.3]}
    found = progress(plan, values, is_spent=True)
    assert found.wanted == progress(plan, {}).wanted
    assert (found.decision.ended, verdicts(found.decision)["bonus"]) == ("budget", ("undecided", 3))


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["metric=eval_rewrad"], '[decision].metric: no row of plain will have "eval_rewrad"; did you mean'),
        (["metric=eval_billed_KIND"], "[decision].metric: no row of plain will have"),
        (["metric=eval_pass_at_8"], "[decision].metric: no row of plain will have"),
        (["reference=plane"], "[decision].reference: no condition is named \"plane\"; did you mean 'plain'"),
        (["max_seeds=2"], "decision.max_seeds: got 2; needs at least 3"),
        (["max_seeds=101"], "decision.max_seeds: got 101; needs at most 100"),
        (["error=0"], "decision.error: got 0; needs at least 1e-09"),
        (["error=1e-20"], "decision.error: got 1e-20; needs at least 1e-09"),
        (["budget=soon"], "[decision].budget: 'soon' is not a time span"),
    ],
)
def test_what_cannot_be_decided_is_refused(decision_file: Path, overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        planned(decision_file, *(f"decision.{one}" for one in overrides))
    assert problem in str(error.value)


def test_more_seeds_than_may_be_used_are_refused(decision_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_seeds: got 3, but campaign.seeds has 4"):
        planned(decision_file, "decision.max_seeds=3", "campaign.seeds=[1, 2, 3, 4]")


def test_one_condition_cannot_be_decided(decision_file: Path) -> None:
    decision_file.write_text(DECISION.partition("[[campaign")[0])
    with pytest.raises(ConfigError, match="compares conditions, and there is one"):
        planned(decision_file)


def test_a_campaign_stops_when_all_conditions_are_decided(decision_file: Path) -> None:
    outcome = start(decision_file).execute()
    found = decision_of(outcome.directory)
    assert verdicts(found)["bonus"] == ("better", 7)
    assert found.conditions[0].difference == pytest.approx(0.5)
    assert (outcome.exit_code, found.ended, found.reference) == (EXIT_DONE, "decided", "plain")
    assert found.runs + found.saved_runs == 24
    (status,) = survey(outcome.directory)
    assert (status.state, len(status.runs), status.decision) == ("done", found.runs, found)


class StopAfter(Observer):
    """Asks the campaign to stop after some of its runs."""

    def __init__(self, runs: int) -> None:
        self.left = runs
        self.stop: Callable[[], None] = lambda: None

    def ended(self, *_: object) -> None:
        self.left -= 1
        if self.left == 0:
            self.stop()


def stopped_after(path: Path, runs: int, overrides: Sequence[str] = ()) -> CampaignOutcome:
    observer = StopAfter(runs)
    campaign = start(path, overrides, observer)
    observer.stop = campaign.stop
    return campaign.execute()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign that nothing stopped; it is to be read."""
    directory = tmp_path_factory.mktemp("undisturbed")
    (directory / "decision.toml").write_text(DECISION)
    log_dir = f"logging.log_dir='{directory / 'logs'}'"
    return start(directory / "decision.toml", [log_dir]).execute().directory


def test_status_says_whether_questions_or_seeds_are_worth_more(decision_file: Path) -> None:
    evaluation = '[[eval]]\nname = "hard"\nprompts = 4\nsamples = 4\ntemperature = 1.0\n'
    text = DECISION.partition('[[campaign.conditions]]\nname = "bonus"')
    decision_file.write_text(evaluation + text[0] + text[1] + "\ntraining.lr = 0.1\n")
    few = ["campaign.seeds=[1,2,3,4,5,6]", "decision.metric=eval_hard_reward", "decision.max_seeds=6"]
    stopped = stopped_after(decision_file, 11, few)
    assert decision_of(stopped.directory).noise is None
    reopened = reopen(stopped.directory).execute().directory
    noise = decision_of(reopened).noise
    assert noise is not None
    assert (noise.seeds, noise.questions) == (6, 4)
    assert noise == decision_of(start(decision_file, few).execute().directory).noise
    assert str(noise) in lines_of(decision_of(reopened))


@pytest.mark.parametrize("runs", [4, 9, 12])
def test_a_stopped_campaign_comes_to_the_same_verdicts(
    undisturbed: Path, decision_file: Path, runs: int
) -> None:
    stopped = stopped_after(decision_file, runs)
    assert stopped.exit_code == EXIT_INTERRUPTED
    assert survey(stopped.directory)[0].state == "interrupted"
    CampaignFiles(stopped.directory).manifest.unlink()  # only the runs' records decide
    assert reopen(stopped.directory).execute().exit_code == EXIT_DONE
    assert decision_of(stopped.directory) == decision_of(undisturbed)


def test_a_condition_whose_runs_fail_gets_no_more_seeds(decision_file: Path) -> None:
    text = DECISION.replace("reward.params.bonus = 0.5", 'reward.reward = "tests.plugins.broken"')
    decision_file.write_text(text)
    outcome = start(decision_file).execute()
    found = decision_of(outcome.directory)
    assert (outcome.exit_code, verdicts(found)["bonus"]) == (EXIT_RUN_FAILED, ("undecided", 0))
    assert (found.ended, found.runs) == ("failed", 9)  # none was run for nothing


def test_status_and_compare_tell_the_verdicts(
    undisturbed: Path, retrain: Callable[..., CompletedProcess[str]]
) -> None:
    directory = undisturbed
    line = "bonus: better than plain in mean_reward after 7 seeds: difference +0.500"
    assert line in retrain("status", directory).stdout
    assert line in retrain("compare", directory).stdout
    removed = "the variance of the difference 100% smaller (bonus), 100% smaller (alike)"
    assert removed in retrain("status", directory).stdout
    found = json.loads(retrain("compare", directory, "--json").stdout)["comparisons"][0]["decision"]
    assert found["conditions"][0]["verdict"] == "better"


def test_seeds_that_are_added_leave_everything_else_as_it_was(
    decision_file: Path, retrain: Callable[..., CompletedProcess[str]]
) -> None:
    directory = start(decision_file).execute().directory
    before, rows = (
        decision_of(directory),
        (directory / "runs" / "plain_s5" / "metrics.jsonl").stat().st_mtime_ns,
    )
    assert "by hand" not in retrain("compare", directory).stdout
    done = retrain("resume", directory, "--seeds", "+2")
    assert (done.returncode, retrain("resume", directory).returncode) == (EXIT_DONE, EXIT_DONE)
    after = decision_of(directory)
    assert (after.conditions, after.ended, after.runs) == (before.conditions, "decided", before.runs + 6)
    assert (directory / "runs" / "plain_s5" / "metrics.jsonl").stat().st_mtime_ns == rows
    assert {run.seed for run in survey(directory)[0].runs} == {*SEEDS[:7], 14, 15}
    assert "added by hand afterwards (2 to each condition)" in retrain("compare", directory).stdout


def test_seeds_that_are_added_use_up_no_budget(decision_file: Path) -> None:
    decision_file.write_text(DECISION.replace("max_seeds = 8", 'max_seeds = 8\nbudget = "8h"'))
    directory = stopped_after(decision_file, 4).directory
    campaign = reopen(directory, more_seeds=1)
    attempts = campaign.files_of("plain_s14").attempts
    attempts.parent.mkdir(parents=True, exist_ok=True)
    end_attempt(attempts, begin_attempt(attempts), RunState.INTERRUPTED)
    append_line(attempts, {"event": "end", "attempt": 1, "ended_at": "2999-01-01T00:00:00Z"})
    assert campaign.execute().exit_code == EXIT_DONE
    assert decision_of(directory).ended == "decided"


def test_no_round_begins_once_the_runs_have_cost_too_much(decision_file: Path) -> None:
    prices = "[budget.prices.numpy]\nsample = 1000\n"
    decision_file.write_text(prices + DECISION.replace("max_seeds = 8", "max_seeds = 8\nbudget_usd = 0.01"))
    directory = start(decision_file).execute().directory
    found = decision_of(directory)
    assert (found.ended, found.runs) == ("budget", 9)  # three seeds of each condition had begun
    [seen] = survey(directory)
    assert seen.cost_usd is not None
    assert seen.cost_usd > 0.01
    decision_file.write_text(DECISION.replace("max_seeds = 8", "max_seeds = 8\nbudget_usd = 5"))
    with pytest.raises(ConfigError, match=r'\[decision\]\.budget_usd: the price of "numpy" is not known'):
        planned(decision_file)


def test_a_campaign_without_a_decision_gets_more_seeds(campaign_file: Path) -> None:
    directory = start(campaign_file, ["campaign.launcher=inline"]).execute().directory
    outcome = reopen(directory, more_seeds=1).execute()
    assert sorted(outcome.states) == [f"{c}_s{s}" for c in ("grpo", "maxrl") for s in (0, 1, 2)]
    assert outcome.exit_code == EXIT_DONE


@pytest.mark.parametrize("seeds", ["4", "+0", "+x", "-1"])
def test_a_number_of_seeds_has_a_plus(
    decision_file: Path, retrain: Callable[..., CompletedProcess[str]], seeds: str
) -> None:
    done = retrain("resume", decision_file.parent, f"--seeds={seeds}")
    assert done.returncode == EXIT_CONFIG
    assert "needs + and a number" in done.stderr


def test_explain_tells_how_many_seeds_it_takes(
    decision_file: Path, retrain: Callable[..., CompletedProcess[str]]
) -> None:
    first = ["--set", "decision.max_seeds=7", "--json"]
    unknown = json.loads(retrain("explain", decision_file, *first).stdout)["expected_seeds"]
    assert [(one["difference"], one["unit"]) for one in unknown] == [(0, "SD"), (1, "SD"), (2, "SD")]
    assert unknown[0]["found"] <= 0.2  # 60 draws at 5 %
    assert unknown[2]["found"] > unknown[1]["found"] > unknown[0]["found"]
    start(
        decision_file,
        [
            "training.temperature=0.9",
            "campaign.conditions=[{name='plain'}, {name='bonus', training={batch_size=3}}]",
        ],
    ).execute()
    known = retrain(
        "explain", decision_file, *first, "--set", "decision.smallest_difference=0.01", "--from", "logs"
    )
    assert [one["unit"] for one in json.loads(known.stdout)["expected_seeds"]] == ["mean_reward"] * 3


def test_explain_forecasts_the_allocation_and_the_budget(decision_file: Path) -> None:
    """Conditions that are equal, and 1 and 2 standard deviations off; all 24 runs would take a day."""
    plan, none = planned(decision_file), decision_file.parent / "none"
    table = plan.decision
    assert table is not None

    def expected(**keys: Any) -> tuple[list[float], list[float]]:
        found = expected_seeds(Most(plan, 86_400.0, 24.0), replace(table, **keys), none)
        return [one.runs for one in found], [one.found for one in found]

    (equal_runs, equal_found), (runs, found) = expected(), expected(allocate="auto")
    assert runs[0] < equal_runs[0]  # what is unlikely to be found is given up
    assert found[1] < equal_found[1]
    assert found[2] > 0.9
    runs, found = expected(budget="10h")
    assert (max(runs), found) == (12, [0, 0, 0])  # the round that passes the budget ends
    runs, found = expected(allocate="auto", budget_usd=5)
    assert (runs, found) == ([9, 9, 9], [0, 0, 0])  # the first seeds of three conditions


def test_explain_tells_of_a_budget_that_ends_before_there_can_be_a_verdict(decision_file: Path) -> None:
    """Three conditions of 8 seeds take a day; the fewest for a verdict are 7."""
    plan = planned(decision_file)
    table, most = plan.decision, Most(plan, 86_400.0, 24.0)
    assert table is not None
    assert (
        ends_too_early(most, replace(table, budget="19h", budget_usd=19.0)) == ""
    )  # the seventh seed begins
    assert ends_too_early(Most(plan), replace(table, budget="1s", budget_usd=0.01)) == ""  # nothing is known
    assert "7 seeds of 3 conditions and takes about 21 h" in ends_too_early(
        most, replace(table, budget="17h")
    )
    assert "takes about $21.00" in ends_too_early(most, replace(table, budget_usd=17.0))
    auto = replace(table, allocate="auto")  # six seeds of two conditions, and three of the third: 15 h
    assert ends_too_early(most, replace(auto, budget="13h")) == ""
    assert "6 seeds of one condition and the reference, beside the first of all 3, and takes about 15 h" in (
        ends_too_early(most, replace(auto, budget="12h"))
    )
    seconds = replace(table, per="seconds", over=[0.0, 600.0])  # 21 runs of ten minutes, at no known time
    assert ends_too_early(Most(plan), replace(seconds, budget="1d")) == ""
    assert f"takes at least {about(21 * 600 / plan.workers)}" in (
        ends_too_early(Most(plan), replace(seconds, budget="10min"))
    )
    rungs = replace(table, rungs=[5.0, 20.0], max_seeds=8, budget="3h", error=0.1)
    assert "7 seeds of 3 conditions, to 5 steps, and takes about 5 h" in ends_too_early(most, rungs)


def test_explain_tells_of_a_budget_of_the_campaign_that_ends_before_there_can_be_a_verdict(
    decision_file: Path,
) -> None:
    """Three conditions of 8 seeds cost $24, the 7 for a verdict $21; at $0.50 each, these cost $10.50."""

    def told(usd: float, *overrides: str) -> str:
        text = f"{DECISION}[budget]\nusd = {usd}\n[budget.prices.numpy]\nsample = 1.0\n"
        decision_file.write_text(text)
        plan = planned(decision_file, *overrides)
        assert plan.decision is not None
        cost = None if overrides else 24.0
        return ends_too_early(Most(plan, cost_usd=cost), plan.decision)

    assert "[budget].usd = 20 ends" in told(20.0)
    assert "7 seeds of 3 conditions and takes about $21.00" in told(20.0)
    assert told(22.0) == ""
    window = ("decision.per=usd", "decision.over=[0, 0.5]")  # needs no history
    assert "[budget].usd = 10 ends" in told(10.0, *window)
    assert "takes at least $10.50" in told(10.0, *window)
    assert told(11.0, *window) == ""
    assert "[decision].budget_usd = 5 ends" in told(11.0, *window, "decision.budget_usd=5")
    assert "8 seeds of 3 conditions, to 0.25 dollars, and takes at least $6.00" in told(
        5.0, "decision.per=usd", "decision.rungs=[0.25, 0.5]"
    )


@pytest.mark.parametrize(
    ("overrides", "enough"),
    [
        (["max_seeds=6"], "max_seeds = 7 may"),
        (["error=1e-6", "max_seeds=50"], "a larger error may"),
        ([], ""),
    ],
)
def test_too_few_seeds_to_find_a_difference_are_told_before(
    decision_file: Path, overrides: list[str], enough: str
) -> None:
    warned = undecidable(planned(decision_file, *(f"decision.{one}" for one in overrides)))
    assert (enough in warned, bool(warned)) == (True, bool(enough))


def test_explain_and_the_campaign_tell_that_no_difference_can_be_found(
    decision_file: Path, retrain: Callable[..., CompletedProcess[str]]
) -> None:
    few = ["--set", "decision.max_seeds=3"]
    told = "max_seeds = 3 finds no difference at error = 0.05 with 2 comparisons"
    assert told in retrain("explain", decision_file, *few).stdout
    assert told in retrain("run", decision_file, *few).stderr


def test_a_held_out_metric_needs_held_out_prompts(decision_file: Path) -> None:
    plan = planned(decision_file, "decision.metric=eval_reward", "data.options={held_out=0.0}")
    with pytest.raises(
        ConfigError, match="eval_reward is measured on held-out prompts, and 'successor' holds"
    ):
        preflight(plan, decision_file.name)
    preflight(planned(decision_file, "decision.metric=eval_reward"), decision_file.name)


def test_an_evaluation_of_its_own_may_decide(decision_file: Path) -> None:
    decision_file.write_text('[[eval]]\nname = "hard"\nsamples = 4\ntemperature = 1.0\n' + DECISION)
    plan = planned(decision_file, "decision.metric=eval_hard_pass_at_4")
    assert plan.decision is not None


def test_nothing_is_created_for_a_file_that_cannot_decide(
    decision_file: Path, retrain: Callable[..., CompletedProcess[str]]
) -> None:
    done = retrain("run", decision_file, "--set", "decision.reference=none")
    assert (done.returncode, Path("logs").exists()) == (EXIT_CONFIG, False)
