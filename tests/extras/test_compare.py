"""`retrain compare`: which runs count, what may be named, and what is said of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from typer.testing import CliRunner

from retrain.base.errors import ConfigError
from retrain.campaign.run import run_campaign
from retrain.cli import app
from retrain.config.resolve import label_of
from retrain.records.decision import ConditionDecision, Decision, is_higher_better
from retrain.records.manifest import read_manifest, write_manifest
from retrain.records.rungs import Rung, Searched
from retrain.records.windows import Window
from retrain.results.report.compare import Comparison, Outcome, compare
from retrain.results.report.gather import gather
from retrain.results.report.sides import Match, choose, conditions, final_value
from retrain.results.report.tables import excluded, footnotes, grounds, partly_paired, results
from tests.simulated import Simulated, flat, write_campaign

SPREAD = (0.0, 0.02, 0.03, 0.01)  # of four seeds
Call = Callable[..., CompletedProcess[str]]


def two(low: float = 0.5, high: float = 0.9) -> dict[tuple[str, int], Simulated]:
    """Two conditions that four seeds tell apart."""
    return {("grpo", s): flat(low + x) for s, x in enumerate(SPREAD)} | {
        ("maxrl", s): flat(high - x) for s, x in enumerate(SPREAD)
    }


def compared(directory: Path, *names: str, **options: Any) -> Comparison:
    (match,) = choose([str(directory), *names])
    return compare(match, **options)


def outcome(comparison: Comparison) -> str:
    return comparison.metrics[0].differences[0].outcome


def test_conditions_of_a_campaign_are_compared_with_the_first(tmp_path):
    found = compared(write_campaign(tmp_path, two()))
    reward = found.metrics[0]
    assert (reward.metric, [side.label for side in reward.sides]) == ("eval_reward", ["grpo", "maxrl"])
    assert reward.differences[0].difference.difference == pytest.approx(0.4 - 2 * sum(SPREAD) / 4)
    assert outcome(found) == Outcome.HIGHER


def test_a_lower_value_is_called_lower(tmp_path):
    assert outcome(compared(write_campaign(tmp_path, two(0.9, 0.5)))) == Outcome.LOWER


def test_a_campaign_compared_with_itself_is_identical(tmp_path):
    directory = write_campaign(tmp_path, two())
    assert outcome(compared(directory, "grpo", str(directory), "grpo")) == Outcome.IDENTICAL


def test_two_seeds_are_not_enough_however_far_apart(tmp_path):
    runs = {(c, s): flat(reward + s / 100) for c, reward in (("grpo", 0.1), ("maxrl", 0.9)) for s in (0, 1)}
    assert outcome(compared(write_campaign(tmp_path, runs))) == Outcome.NOT_ENOUGH


def test_what_cannot_be_read_is_named_with_the_reason(tmp_path):
    directory = write_campaign(tmp_path, two())
    (directory / "manifest.json").write_text('{"torn')
    lost = tmp_path / "lost-20250131T120010Z-0a1b"
    (lost / "runs").mkdir(parents=True)
    shown = CliRunner().invoke(app, ["compare", str(tmp_path), "--json"])
    first, second = json.loads(shown.stdout)["left_out"]
    assert first.startswith(f"{lost} is left out: it has runs, but no campaign.toml")
    assert second.startswith(f"{directory / 'manifest.json'}: is not valid JSON")
    assert shown.stderr.splitlines() == [first, second]
    assert shown.exit_code == 0


def test_runs_that_failed_or_are_not_finished_are_counted_and_left_out(tmp_path):
    bad = {("maxrl", 4): flat(0.0, 3, ending="failed"), ("maxrl", 5): flat(0.0, 3, ending="")}
    side = compared(write_campaign(tmp_path, two() | bad)).metrics[0].sides[1]
    assert (side.runs, side.failed, side.unfinished, side.sample.n) == (6, 1, 1, 4)
    assert min(value for _, value in side.values) > 0.8


def said(comparison: Comparison) -> str:
    """All sentences about the first metric."""
    metric = comparison.metrics[0]
    return "\n".join((*excluded(metric), *(ground.because for ground in grounds(metric))))


@pytest.mark.parametrize(
    ("metric", "good"),
    [
        ("eval_reward", True), ("eval_correct_rate", True), ("eval_pass_at_4", True),
        ("tokens_per_second", True),
        ("eval_reward_error_fraction", False), ("reward_timeout_fraction", False), ("reward_time_s", False),
        ("max_token_hit_rate", False), ("zero_signal_group_fraction", False),
        ("unscored_fraction", False), ("reward_faults", False),
        ("tool_errors", False), ("eval_pass_at_se_4", None),
        ("reward_std", None), ("entropy", None),
        ("eval_correct_rate_se", None), ("eval_reward_hack_prompts", None),
    ],
)  # fmt: skip
def test_it_is_known_which_way_a_metric_is_good(metric, good):
    assert is_higher_better(metric) is good


def test_of_conditions_that_have_the_same_said_of_them_it_is_said_once(tmp_path):
    runs = {(f"c{i}", 0): flat(i / 10) for i in range(8)}
    failed = {(f"f{i}", 0): flat(0.1, 3, ending="failed") for i in range(2)}
    metric = compared(write_campaign(tmp_path, runs | failed)).metrics[0]
    assert [(ground.names, ground.because) for ground in grounds(metric)] == [
        ("c1, c2, c3, c4, c5 and 2 more", "1 seed finished in both; at least 3 are needed"),
        ("f0, f1", "1 and 0 finished runs; at least 3 each are needed"),
    ]
    assert list(excluded(metric)) == ["f0, f1: of 1 run each, 1 failed: left out"]


def test_conditions_that_ended_at_different_steps_are_told_and_may_be_compared_at_one(tmp_path):
    runs = {("grpo", s): flat(0.5 + s / 9, 20) for s in range(3)} | {("maxrl", 0): flat(0.9, 50)}
    directory = write_campaign(tmp_path, runs)
    assert "grpo ran 20 steps, maxrl 50; --step 20 compares" in said(compared(directory))
    assert "--step" not in said(compared(directory, window=Window(end=20), metrics=["mean_reward"]))


def test_conditions_that_ended_at_different_steps_get_no_verdict(tmp_path):
    runs = {("grpo", s): flat(0.1 + s / 99, 20) for s in range(3)}
    runs |= {("longer", s): flat(0.9 + s / 90, 50) for s in range(3)}
    runs |= {("alike", s): flat(0.8 + s / 95, 20) for s in range(3)}
    directory = write_campaign(tmp_path, runs)
    longer, alike = compared(directory, metrics=["mean_reward"]).metrics[0].differences
    assert (longer.outcome, longer.p_adjusted) == (Outcome.OTHER_STEPS, None)
    assert (alike.outcome, alike.p_adjusted) == (Outcome.HIGHER, alike.difference.p)  # the only one judged
    assert "20 and 50 steps cannot be compared" in said(compared(directory, metrics=["mean_reward"]))
    at_20 = compared(directory, metrics=["mean_reward"], window=Window(end=20)).metrics[0]
    assert [one.outcome for one in at_20.differences] == [Outcome.HIGHER, Outcome.HIGHER]
    columns, (_, shown, _) = results(compared(directory, metrics=["mean_reward"]).metrics[0])
    row = dict(zip(columns, shown, strict=True))
    assert (row[">difference"], row["outcome"]) == ("+0.801", "not comparable")
    assert {row[name] for name in ("95 % interval", ">P(higher)", "95 % bootstrap interval")} == {"-"}
    times = compared(directory, metrics=["step_time_s"]).metrics[0]
    assert Outcome.OTHER_STEPS not in [one.outcome for one in times.differences]


def test_runs_that_finished_without_the_metric_are_not_called_unfinished(tmp_path):
    only = {("grpo", s): Simulated([0.5] * 9, more=lambda step: {"gap": 1.0 * step}) for s in range(3)}
    found = compared(write_campaign(tmp_path, only | {("maxrl", 0): flat(0.5, 9)}), metrics=["gap"])
    assert said(found).splitlines() == [
        "maxrl: of 1 run, 1 without this metric: left out",
        "3 and 0 runs with a value; at least 3 each are needed",
    ]


def test_a_condition_whose_completions_have_no_score_is_named(tmp_path, retrain):
    def hurt(step):
        return {"unscored_fraction": 0.91, "unscored_outage_fraction": 0.91, "unscored_reason": "503"}

    runs = two() | {("hurt", s): Simulated([0.5] * 20, held_out=0.5, more=hurt) for s in range(4)}
    directory = write_campaign(tmp_path, runs)
    (share,) = compared(directory).unscored
    assert (share.label, share.fraction, share.outage_fraction) == (
        "hurt",
        pytest.approx(0.91),
        pytest.approx(0.91),
    )
    told = "hurt: 91 % of completions sampled for training have no score: the scorer failed or timed out;"
    shown = retrain("compare", directory).stdout
    assert told in " ".join(shown.split())
    assert (
        json.loads(retrain("compare", directory, "--json").stdout)["comparisons"][0]["unscored"][0]["reason"]
        == "503"
    )


OUTAGE = """
[training]
max_steps = 2
batch_size = 2
group_size = 2
max_tokens = 4
[data]
task = "successor"
[campaign]
seeds = [0, 1]
launcher = "inline"
retries = 0
[[campaign.conditions]]
name = "judged"
[[campaign.conditions]]
name = "away"
[campaign.conditions.reward]
reward = "tests.trainer.test_unscored.judges_none"
params = { error = "late" }
"""


def test_a_condition_that_ended_in_its_first_step_without_a_score_is_named(here, retrain):
    (here / "study.toml").write_text(OUTAGE)
    retrain("run", "study.toml")
    (directory,) = (here / "logs").glob("study-*")
    (found,) = json.loads(retrain("compare", directory, "--json").stdout)["comparisons"]
    (share,) = found["unscored"]
    assert (share["label"], share["fraction"], share["left_out"]) == ("away", 1.0, 2)
    told = "away: 100 % of completions sampled for training by 2 failed runs have no score; the first:"
    assert told in " ".join(retrain("compare", directory).stdout.split())


@pytest.mark.parametrize(("steps", "averaged"), [(6, 6), (20, 10), (300, 30)])
def test_the_number_of_steps_that_a_value_is_a_mean_of_is_told(tmp_path, steps, averaged):
    runs = {(c, s): Simulated([step / steps for step in range(steps)]) for c in ("a", "b") for s in range(3)}
    (metric,) = compared(write_campaign(tmp_path, runs, steps=steps), metrics=["mean_reward"]).metrics
    assert metric.how == f"mean of the last {averaged} steps at the end"
    assert metric.sides[0].sample.mean == pytest.approx(1 - (averaged + 1) / 2 / steps)


def decided(directory, verdict, metric="mean_reward", **fields):
    """Give a campaign a decision on its second condition."""
    one = ConditionDecision("maxrl", verdict, 4, 0.4, p_value=0.2)
    decision = Decision(metric, "grpo", 0.05, 12, 8, 16, "decided", conditions=(one,), **fields)
    path = directory / "manifest.json"
    write_manifest(path, replace(read_manifest(path), decision=decision))
    return directory


@pytest.mark.parametrize(
    ("verdict", "told"),
    [
        ("undecided", Outcome.UNDECIDED), ("continue", Outcome.OPEN),
        ("no_difference", Outcome.NO_DIFFERENCE),
        ("better", Outcome.HIGHER), ("worse", Outcome.LOWER),
    ],
)  # fmt: skip
def test_the_table_of_a_decisions_metric_repeats_its_verdict(tmp_path, verdict, told, retrain):
    directory = decided(write_campaign(tmp_path, two()), verdict, unscored={"maxrl": 0.91})
    found = compared(directory, metrics=["mean_reward"])
    assert found.metrics[0].differences[0].outcome == told
    there = compared(directory, "grpo", "maxrl", metrics=["mean_reward"])
    assert there.metrics[0].differences[0].outcome == told
    shown = retrain("compare", directory, "-m", "mean_reward").stdout
    assert shown.index("after 4 seeds") < shown.index("bootstrap")
    assert "completions without a score: 91 % (maxrl)" in shown
    assert "too few seeds for a 95 % interval" in shown


def test_what_decides_is_compared_without_being_asked_for_and_first(tmp_path, retrain):
    directory = decided(write_campaign(tmp_path, two()), "better", metric="train_time_s")
    shown = retrain("compare", directory).stdout
    assert shown.index("\ntrain_time_s ") < shown.index("\nmean_reward ") < shown.index("\nstep_time_s ")
    assert "\ntrain_time_s " not in retrain("compare", directory, "-m", "mean_reward").stdout


def test_of_a_decision_the_seeds_that_both_have_are_paired(tmp_path):
    more = {("maxrl", s): flat(0.1 + s / 50) for s in range(4, 12)}
    directory = write_campaign(tmp_path, two() | more)
    assert compared(directory, metrics=["mean_reward"]).metrics[0].differences[0].difference.n is None
    pairs = compared(decided(directory, "undecided"), metrics=["mean_reward"])
    assert pairs.metrics[0].differences[0].difference.n == 4


def searched(directory, **fields):
    """Give a campaign a search that chose by the first two seeds."""
    path = directory / "manifest.json"
    rung = Rung(3, {"maxrl": 0.9, "grpo": 0.5}, ("maxrl", "grpo"))
    found = Searched("mean_reward", "grpo", (0, 1), (rung,), **fields)
    write_manifest(path, replace(read_manifest(path), searched=found))
    return directory


def test_no_mean_is_over_seeds_that_chose_and_fresh_ones(tmp_path):
    directory = searched(write_campaign(tmp_path, two()), winner="maxrl")
    for found in (compared(directory), compared(directory, "grpo", "maxrl")):
        assert [[seed for seed, _ in side.values] for side in found.metrics[0].sides] == [[2, 3], [2, 3]]
    assert not [line for line in footnotes([found]) if "chose" in line]


def test_seeds_by_which_a_search_chose_are_named(tmp_path):
    found = compared(searched(write_campaign(tmp_path, two()), winner="grpo"))
    assert [line for line in footnotes([found]) if "chose by the seeds of these tables" in line]


def test_seeds_without_a_partner_are_told(tmp_path):
    more = {("maxrl", s): flat(0.1) for s in (7, 8)}
    assert said(compared(write_campaign(tmp_path, two() | more))).startswith(
        "4 pairs of seeds, 2 unpaired runs left out; p "
    )


def test_a_difference_of_some_of_the_seeds_has_the_means_of_these_beside_it(tmp_path, retrain):
    runs = {("grpo", s): Simulated([0.2] * 20, held_out=0.1 * s) for s in range(6)}
    runs |= {("maxrl", s): Simulated([0.2] * 20, held_out=0.1 * s + 0.25) for s in (1, 2, 3, 4)}
    directory = write_campaign(tmp_path, runs)
    (metric,) = compared(directory, metrics=["eval_reward"]).metrics
    assert list(partly_paired(metric)) == [
        "maxrl: the difference is over the 4 seeds that grpo has too (1, 2, 3, 4; means 0.500 and 0.250), "
        "the means of the table over all"
    ]
    shown = " ".join(retrain("compare", directory, "-m", "eval_reward").stdout.split())
    assert "maxrl: the difference is over the 4 seeds that grpo has too" in shown
    assert not list(partly_paired(compared(write_campaign(tmp_path / "b", two())).metrics[0]))


def test_at_a_step_every_run_that_reached_it_counts(tmp_path):
    bad = {("maxrl", 4): flat(0.9, 15, ending="failed"), ("maxrl", 5): flat(0.9, 3, ending="failed")}
    directory = write_campaign(tmp_path, two() | bad)
    side = compared(directory, window=Window(end=10), metrics=["mean_reward"]).metrics[0].sides[1]
    assert (side.failed, side.sample.n) == (1, 5)


def test_a_run_comes_to_the_mean_of_its_last_tenth(tmp_path):
    rewards = [0.0] * 180 + [1.0] * 20
    run = gather(write_campaign(tmp_path, {("grpo", 0): Simulated(rewards)}, steps=200)).runs[0]
    assert final_value(run, "mean_reward", Window()) == 1.0
    assert final_value(run, "mean_reward", Window(last=40)) == 0.5
    assert final_value(run, "mean_reward", Window(end=100)) == 0.0


def test_held_out_metrics_are_those_of_the_last_evaluation(tmp_path):
    rewards = [0.0] * 20
    evaluated = Simulated(
        rewards, held_out=0.7, more=lambda step: {"eval_reward": step / 100} if step % 5 == 0 else {}
    )
    run = gather(write_campaign(tmp_path, {("grpo", 0): evaluated})).runs[0]
    assert final_value(run, "eval_reward", Window()) == 0.7
    assert final_value(run, "eval_reward", Window(end=12)) == 0.1


def test_two_campaigns_are_compared_condition_by_condition(tmp_path):
    first = write_campaign(tmp_path, two(), name="study-aaaa")
    second = write_campaign(tmp_path, two(0.6), name="study-bbbb")
    matches = choose([str(first), str(second)])
    assert [match.title for match in matches] == ["grpo", "maxrl"]
    assert [side.label for side in matches[0].sides] == ["grpo (aaaa)", "grpo (bbbb)"]


def test_a_condition_is_compared_with_one_of_another_campaign(tmp_path):
    first = write_campaign(tmp_path, two(), name="study-aaaa")
    second = write_campaign(tmp_path, two(), name="study-bbbb")
    (match,) = choose([str(first), "grpo", str(second), "maxrl"])
    assert [(side.label, len(side.runs)) for side in match.sides] == [("grpo (aaaa)", 4), ("maxrl (bbbb)", 4)]


def test_runs_are_compared_by_name_or_by_directory(tmp_path):
    directory = write_campaign(tmp_path, two())
    (named,) = choose([str(directory), "grpo_s0", "maxrl_s1"])
    (given,) = choose([str(directory / "runs" / "grpo_s0"), str(directory / "runs" / "maxrl_s1")])
    for match in (named, given):
        assert [(side.label, len(side.runs)) for side in match.sides] == [("grpo_s0", 1), ("maxrl_s1", 1)]


def test_a_run_is_compared_by_the_name_that_status_shows(tmp_path):
    labels = [label_of(name) for name in ("max rl/ü", "b c")]
    directory = write_campaign(tmp_path, {(label, 0): flat(0.5) for label in labels})
    manifest = directory / "manifest.json"
    text = manifest.read_text().replace(f'"condition": "{labels[0]}"', '"condition": "max rl/ü"')
    manifest.write_text(text)
    (match,) = choose([str(directory), "max rl/ü_s0", f"{labels[1]}_s0"])
    assert [len(side.runs) for side in match.sides] == [1, 1]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["grpi"], "neither a directory nor a condition or run of .*, which has grpo, maxrl"),
        (["grpo"], "only 'grpo' is named; name what to compare it with: grpo, maxrl"),
    ],
)
def test_a_name_that_says_too_little_is_answered_with_what_there_is(tmp_path, names, says):
    directory = write_campaign(tmp_path, two())
    with pytest.raises(ConfigError, match=says):
        choose([str(directory), *names])


def test_a_campaign_of_one_condition_has_nothing_to_compare_with(tmp_path):
    with pytest.raises(ConfigError, match="contains only grpo"):
        choose([str(write_campaign(tmp_path, {("grpo", 0): flat(0.5)}))])


def test_campaigns_without_a_common_condition_say_what_they_have(tmp_path):
    both = [{(c, 0): flat(0.5) for c in pair} for pair in (("a", "b"), ("c", "d"))]
    directories = [write_campaign(tmp_path, runs, name=f"study-{i}") for i, runs in enumerate(both)]
    with pytest.raises(ConfigError, match=r"has a, b; .* has c, d"):
        choose([str(path) for path in directories])


def test_a_directory_of_several_campaigns_names_them(tmp_path):
    for name in ("one-aaaa", "two-bbbb"):
        write_campaign(tmp_path, two(), name=name)
    with pytest.raises(ConfigError, match="is a log directory; name a campaign"):
        choose([str(tmp_path)])


@pytest.mark.parametrize("make", [True, False])
def test_an_empty_or_missing_directory_says_so(tmp_path, make):
    directory = tmp_path / "logs"
    if make:
        directory.mkdir()
    with pytest.raises(ConfigError, match=r"no campaigns yet|does not exist"):
        choose([str(directory)])


def test_the_configurations_differences_leave_out_seeds_and_places(tmp_path):
    found = compared(write_campaign(tmp_path, two()))
    assert [(row.key, row.values) for row in found.config] == [
        ("algorithm.advantage_mode", ('"grpo"', '"maxrl"'))
    ]


def test_a_run_whose_configuration_is_lost_differs_in_nothing(tmp_path):
    campaign = write_campaign(tmp_path, {("grpo", 0): flat(0.5), ("maxrl", 0): flat(0.5)})
    (campaign / "runs" / "maxrl_s0" / "run.toml").unlink()
    assert compared(campaign).config == ()


def test_long_values_that_part_late_are_shown_where_they_part(tmp_path):
    campaign = write_campaign(tmp_path, {("a", 0): flat(0.5), ("b", 0): flat(0.5)})
    for name in "ab":
        (campaign / "runs" / f"{name}_s0" / "run.toml").write_text(f'[data]\npath = "{"x" * 200}{name}"\n')
    assert [(row.key, row.values) for row in compared(campaign).config] == [
        ("data.path", ("…" + "x" * 20 + 'a"', "…" + "x" * 20 + 'b"'))
    ]


def test_several_conditions_share_the_risk_of_a_false_claim(tmp_path):
    others = {(f"other{i}", s): flat(0.5 + x + i / 100) for i in range(9) for s, x in enumerate(SPREAD)}
    for judged in compared(write_campaign(tmp_path, two() | others)).metrics[0].differences:
        assert judged.p_adjusted is not None
        assert judged.difference.p is not None
        assert judged.p_adjusted >= judged.difference.p


def test_runs_without_rows_are_nothing_to_compare(tmp_path, retrain):
    directory = write_campaign(tmp_path, {(c, 0): Simulated([], ending="") for c in ("grpo", "maxrl")})
    answer = retrain("compare", directory)
    assert (answer.returncode, "nothing to compare" in answer.stdout) == (0, True)


def test_torn_lines_and_hostile_values_do_not_stop_a_comparison(tmp_path):
    directory = write_campaign(tmp_path, two())
    with (directory / "runs" / "grpo_s0" / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\x00{"step": 2\n[1]\n{"step": 20, "mean_reward": "high", "loss": 1e999}\n')
    assert outcome(compared(directory)) == Outcome.HIGHER
    assert "2 lines of metrics.jsonl" in gather(directory).problems[0]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_table_keeps_to_the_width_it_has(tmp_path, retrain: Call, width):
    directory = write_campaign(tmp_path, two())
    environment = {**os.environ, "COLUMNS": str(width), "NO_COLOR": "1"}
    answer = retrain("compare", directory, "-m", "eval_reward", env=environment)
    tables = [line for line in answer.stdout.splitlines() if line.startswith(" ") and ": " not in line]
    assert max(map(len, tables)) <= width
    assert "higher" in answer.stdout
    assert "\x1b" not in answer.stdout


def test_swept_conditions_are_told_apart_on_a_narrow_terminal(tmp_path, retrain: Call):
    names = [f"loss=ppo learning_rate=1e-0{power} group_size=16" for power in range(3, 9)]
    directory = write_campaign(tmp_path, {(name, 0): flat(0.5) for name in names})
    answer = retrain("compare", directory, "-m", "eval_reward", env={**os.environ, "COLUMNS": "80"})
    first = [line.split()[0] for line in answer.stdout.splitlines() if line.startswith(" learning_rate")]
    assert first == [name.split()[1] for name in names]


def test_json_holds_what_the_table_shows(tmp_path, retrain: Call):
    directory = write_campaign(tmp_path, two())
    shown = json.loads(retrain("compare", directory, "grpo", "maxrl", "--json").stdout)
    (found,) = shown["comparisons"]
    sides: list[Mapping[str, Any]] = found["metrics"][0]["sides"]
    assert [(side["label"], side["sample"]["n"]) for side in sides] == [("grpo", 4), ("maxrl", 4)]
    assert found["metrics"][0]["differences"][0]["outcome"] == "higher"
    assert shown["version"] == 1


def test_a_metric_that_no_run_has_is_answered_with_those_there_are(tmp_path, retrain: Call):
    answer = retrain("compare", write_campaign(tmp_path, two()), "--metric", "mean_rewrad")
    assert (answer.returncode, "did you mean 'mean_reward'" in answer.stderr) == (2, True)


def test_what_seeds_could_find_is_said_of_one_comparison_alone(tmp_path):
    noise = {"grpo": (0.5, 0.7, 0.6), "maxrl": (0.75, 0.6, 0.7), "gtpo": (0.6, 0.75, 0.55)}
    runs = {(name, seed): flat(x) for name, xs in noise.items() for seed, x in enumerate(xs)}
    directory = write_campaign(tmp_path, runs)
    assert said(compared(directory, "grpo", "maxrl")).endswith("with 80 % power")
    assert "with 80 % power in a single comparison" in said(compared(directory))


def test_no_step_is_advised_where_a_side_has_no_rows(tmp_path):
    runs = {("grpo", s): flat(0.5) for s in range(3)} | {("maxrl", s): flat(0.5) for s in range(3)}
    directory = write_campaign(tmp_path, runs)
    for run in (directory / "runs").glob("maxrl_*"):
        (run / "metrics.jsonl").write_text("")
    (line,) = excluded(compared(directory).metrics[0])
    assert "maxrl 0" in line
    assert "--step" not in line


def test_of_many_conditions_the_first_are_shown_and_the_others_counted(tmp_path, retrain: Call):
    runs = {(f"c{number}", 0): flat(number / 100) for number in range(40)}
    directory = str(write_campaign(tmp_path, runs))
    shown = retrain("compare", directory).stdout
    assert " c29 " in shown
    assert " c30 " not in shown
    assert "... and 10 more conditions; --json lists all" in shown
    metric = json.loads(retrain("compare", directory, "--json").stdout)["comparisons"][0]["metrics"][0]
    assert len(metric["sides"]) == 40


def test_of_many_conditions_those_found_to_differ_are_shown_first(tmp_path, retrain):
    alike = {(f"c{n}", s): flat(0.5 + x) for n in range(40) for s, x in enumerate(SPREAD)}
    better = {("better", s): flat(0.9 - x) for s, x in enumerate(SPREAD)}
    shown = retrain("compare", write_campaign(tmp_path, alike | better, steps=2), "-m", "mean_reward").stdout
    assert " better  " in shown.partition("more conditions")[0]


def test_runs_without_a_reward_are_compared_by_their_evaluations(here: Path) -> None:
    (here / "c.toml").write_text(
        "[training]\nbatch_size = 2\ngroup_size = 2\nmax_tokens = 4\ntemperature = 1.0\n"
        '[data]\ntask = "successor"\n[[eval]]\nname = "right"\nreward = "match"\n'
        "[campaign]\nseeds = [0, 1, 2]\nmax_steps = 2\n"
        '[[campaign.conditions]]\nname = "rewarded"\n'
        '[[campaign.conditions]]\nname = "taught"\nreward = { reward = "none" }\n'
        'teacher = { teacher = "self" }\n'
    )
    directory = run_campaign(here / "c.toml").directory
    record = gather(directory)
    found = compare(Match("", tuple(conditions(record)), record))
    assert [metric.metric for metric in found.metrics] == [
        "eval_right_reward",
        "eval_reward",
        "mean_reward",
        "step_time_s",
    ]
    assert all(side.sample.mean is not None for side in found.metrics[0].sides)
