"""`[decision] over`, `per` and `finish`: what is compared, and where runs end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from retrain.base.errors import ConfigError
from retrain.campaign.run import reopen, start
from retrain.config.load import load_config
from retrain.plan.build import plan_runs
from retrain.plan.decision import decide
from retrain.plan.notes import warnings_of
from retrain.records.decision import Decision, Unreached, ending_of, lines_of, read_looks
from retrain.records.layout import CampaignFiles
from retrain.records.lines import Row
from retrain.records.manifest import read_manifest
from retrain.records.metrics import read_metrics
from retrain.records.run_state import read_done
from retrain.records.windows import Window
from retrain.results.report.compare import compare
from retrain.results.report.sides import choose
from tests.long.test_decision import DECISION, decision_of, stopped_after

FILE = DECISION.replace("max_steps = 2", "max_steps = 12").replace("max_seeds = 8", "max_seeds = 4")
DEAR = 'name = "alike"\ntraining.group_size = 8'


@pytest.fixture
def file(here: Path) -> Path:
    path = here / "decision.toml"
    path.write_text(FILE)
    return path


def runs_of(directory: Path) -> dict[str, Sequence[Row]]:
    """Return the rows of each run that was needed."""
    rows = {run.name: read_metrics(run) for run in (directory / "runs").iterdir()}
    return {name: several for name, several in rows.items() if several}


def values_by_hand(directory: Path, first: int, last: int) -> dict[str, float]:
    """Return each run's mean over these steps, of its rows as they are."""
    return {
        name: statistics.fmean(row["mean_reward"] for row in rows if first <= row["step"] <= last)
        for name, rows in runs_of(directory).items()
    }


def looked_at(directory: Path) -> dict[str, float | None]:
    return read_looks(CampaignFiles(directory).looks).values


def difference(decision: Decision, values: dict[str, float], name: str) -> float:
    """Return the mean difference to the reference over the seeds that both have."""
    pairs = [
        values[run] - values[run.replace(name, decision.reference)] for run in values if run.startswith(name)
    ]
    return statistics.fmean(pairs)


def steps_of(directory: Path) -> set[int]:
    return {rows[-1]["step"] for rows in runs_of(directory).values()}


def test_runs_end_where_the_window_ends(file: Path) -> None:
    outcome = start(file, ["decision.over=[3, 6]"]).execute()
    found, by_hand = decision_of(outcome.directory), values_by_hand(outcome.directory, 3, 6)
    assert steps_of(outcome.directory) == {6}
    assert looked_at(outcome.directory) == pytest.approx(by_hand)
    assert found.conditions[0].difference == pytest.approx(difference(found, by_hand, "bonus"))
    assert "in mean_reward over steps 3 to 6 after" in lines_of(found)[0]
    assert {run.max_steps for run in read_manifest(CampaignFiles(outcome.directory).manifest).runs} == {6}


def test_compare_asks_what_the_decision_asks(file: Path) -> None:
    directory = start(file, ["decision.over=[3, 6]"]).execute().directory
    (match,) = choose([str(directory)])
    found, (metric,) = decision_of(directory), compare(match, ["mean_reward"]).metrics
    assert (metric.window, found.window) == (Window("steps", 2, 6), Window("steps", 2, 6))
    assert metric.differences[0].is_of_decision
    assert metric.differences[0].difference.difference == pytest.approx(found.conditions[0].difference)
    (metric,) = compare(match, ["mean_reward"], Window()).metrics
    assert not metric.differences[0].is_of_decision
    whole = start(file, ["decision.over=whole"]).execute().directory
    (metric,) = compare(*choose([str(whole)]), ["mean_reward"]).metrics
    assert metric.differences[0].is_of_decision


def test_finish_runs_to_the_end_and_compares_the_same(file: Path, tmp_path: Path) -> None:
    over = ["decision.over=[1, 6]", "decision.max_seeds=3"]
    ended = start(file, over).execute().directory
    finished = start(file, [*over, "decision.finish=true"]).execute().directory
    assert (steps_of(ended), steps_of(finished)) == ({6}, {12})
    assert looked_at(ended) == looked_at(finished)
    assert decision_of(ended).saved_share == 0.5  # what comes after step 6
    assert replace(decision_of(ended), saved_share=0.0) == decision_of(finished)


def test_the_whole_run_is_compared(file: Path) -> None:
    directory = start(file, ["decision.over=whole", "decision.max_seeds=3"]).execute().directory
    assert looked_at(directory) == pytest.approx(values_by_hand(directory, 1, 12))
    assert "over all steps of a run" in lines_of(decision_of(directory))[0]


def test_conditions_are_compared_at_equal_tokens(file: Path) -> None:
    file.write_text(FILE.replace('name = "alike"', DEAR))
    over = ["decision.per=tokens", "decision.over=[0, 150]", "decision.max_seeds=3"]
    directory = start(file, over).execute().directory
    by_hand, steps = {}, {}
    for name, rows in runs_of(directory).items():
        total, weighted = 0.0, []
        for row in rows:
            share = min(150.0, total + row["tokens_per_step"]) - total
            weighted.append(share * row["mean_reward"])
            assert total < 150
            total += row["tokens_per_step"]
        assert total >= 150
        by_hand[name], steps[name] = math.fsum(weighted) / 150, rows[-1]["step"]
    assert looked_at(directory) == pytest.approx(by_hand)
    assert steps["alike_s5"] < steps["plain_s5"] < 12
    assert "over the first 150 sampled tokens after" in lines_of(decision_of(directory))[0]


def test_a_plan_says_that_it_does_not_know_where_an_amount_is_spent(file: Path) -> None:
    for over, is_told in (
        (["decision.over=[1, 5]"], False),
        (["decision.per=tokens", "decision.over=[0, 150]"], True),
    ):
        plan = plan_runs(load_config(file, over), str(file))
        told = [note for note in warnings_of(plan, {}) if "as if they went to max_steps" in note]
        assert bool(told) == is_told


def test_a_run_that_ends_before_the_window_has_no_value(file: Path) -> None:
    over = ["decision.per=tokens", "decision.over=[0, 384]", "decision.max_seeds=3"]
    directory = start(file, over).execute().directory
    assert set(looked_at(directory).values()) == {None}
    assert "9 runs ended before the end of the window" in " ".join(lines_of(decision_of(directory)))


def test_runs_that_end_before_the_window_are_no_failures_and_may_go_on(
    file: Path, retrain: Callable[..., CompletedProcess[str]]
) -> None:
    over = ["decision.per=tokens", "decision.over=[0, 384]"]
    directory = start(file, over).execute().directory
    found, rows = decision_of(directory), runs_of(directory)
    spent = [sum(row["tokens_per_step"] for row in several) for several in rows.values()]
    assert found.ended == "unreached"
    assert found.unreached == Unreached(len(rows), min(spent), max(spent), 384)
    assert {one.reason for one in found.conditions} <= {
        f"{whose} last 3 runs ended before the end of the window" for whose in ("its", "plain's")
    }
    for command in ("status", "compare"):
        told = " ".join(retrain(command, str(directory)).stdout.split())
        assert "of 384 sampled tokens, and their seeds are left out; raise max_steps" in told
        assert "--failed" not in told
    assert reopen(directory).execute().exit_code == 0
    assert decision_of(directory) == found  # told again from the records
    toml = CampaignFiles(directory).campaign_toml
    toml.write_text(toml.read_text().replace("max_steps = 12", "max_steps = 40"))
    assert reopen(directory, accept_config_change=True).execute().exit_code == 0
    assert decision_of(directory).unreached is None
    assert None not in looked_at(directory).values()


def test_a_run_that_failed_among_short_ones_is_told_as_failing(file: Path) -> None:
    plan = plan_runs(load_config(file, ["decision.per=tokens", "decision.over=[0, 300]"]), file.name)
    assert plan.decision is not None
    first = {run.run_id: None for run in plan.runs if run.seed in plan.planned_seeds[: plan.first_seeds]}
    reached = dict.fromkeys(first, 250.0)
    all_short = decide(plan, plan.decision, first, first, is_spent=False, reached=reached).decision
    assert (all_short.ended, all_short.unreached) == ("unreached", Unreached(9, 250, 250, 300))
    assert "at 250 of 300 sampled tokens" in ending_of(all_short)
    reached.pop("plain_s5")
    one_failed = decide(plan, plan.decision, first, first, is_spent=False, reached=reached).decision
    assert (one_failed.ended, one_failed.unreached) == ("failed", Unreached(8, 250, 250, 300))
    assert "8 runs ended before the end of the window" in " ".join(lines_of(one_failed))


def test_the_steps_after_a_window_are_saved(file: Path) -> None:
    directory = start(file, ["decision.over=[1, 3]", "decision.max_seeds=3"]).execute().directory
    found = decision_of(directory)
    assert (found.saved_runs, found.saved_share) == (0, 0.75)
    assert ending_of(found).endswith("0 runs saved of 9, and 75% of all steps")


def test_a_window_that_begins_at_step_0_is_told_to_begin_at_1(file: Path) -> None:
    for over, is_told in (("[0, 5]", True), ("[1, 5]", False), ("whole", False)):
        plan = plan_runs(load_config(file, [f"decision.over={over}"]), file.name)
        told = "decision.over = [0, 5]: steps begin at 1, so it means [1, 5]" in warnings_of(plan, {})
        assert told == is_told


def test_held_out_values_are_those_inside_and_at_the_end(file: Path) -> None:
    over = ["decision.metric=eval_reward", "decision.max_seeds=3", "training.eval_every=4"]
    directory = start(file, [*over, "decision.over=[3, 6]"]).execute().directory
    by_hand = {}
    for name, rows in runs_of(directory).items():
        done = read_done(CampaignFiles(directory).run(name).done)
        assert done is not None
        by_hand[name] = statistics.fmean([rows[3]["eval_reward"], done.result["eval_reward"]])
    assert looked_at(directory) == pytest.approx(by_hand)
    spent = ["decision.per=rollouts", "decision.over=[0, 20]", "training.eval_every=0"]
    directory = start(file, [*over[:2], *spent]).execute().directory
    assert None not in looked_at(directory).values()
    assert steps_of(directory) == {3}


@pytest.mark.parametrize(
    "over", [["decision.over=[2, 6]"], ["decision.per=tokens", "decision.over=[0, 150]"]]
)
def test_a_stopped_campaign_decides_the_same_over_its_window(file: Path, over: list[str]) -> None:
    undisturbed = start(file, over).execute().directory
    table = "\n".join(part.removeprefix("decision.").replace("=", " = ", 1) for part in over)
    file.write_text(
        FILE.replace("[decision]", f"[decision]\n{table.replace('tokens', chr(34) + 'tokens' + chr(34))}")
    )
    stopped = stopped_after(file, 4).directory
    CampaignFiles(stopped).manifest.unlink()
    assert reopen(stopped).execute().exit_code == 0
    assert looked_at(stopped) == looked_at(undisturbed)
    assert decision_of(stopped) == decision_of(undisturbed)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["decision.over=[1, 20]"], r"decision.*over.* has 12 steps; end before, or raise its max_steps"),
        (["decision.over=[5]"], r"needs two whole numbers of steps, the smaller one first"),
        (["decision.over=[6, 3]"], r"the smaller one first"),
        (["decision.over=[1.5, 3]"], r"whole numbers of steps"),
        (["decision.over=[-1, 3]"], r"got \[-1, 3\]; needs .* the smaller one first, none below 0"),
        (["decision.over=first"], r'over.*two numbers in a list, "whole" or "last"'),
        (["decision.per=tokens"], r'with per = "tokens" needs \[from, to\]'),
        (["decision.per=token"], r"per"),
        (
            ["decision.over=[1, 3]", "decision.metric=eval_reward", "decision.finish=true"],
            r"decision.*finish.*plain evaluates only at its end, past the window",
        ),
        (["decision.per=usd", "decision.over=[0, 2]"], r"decision.*per.*price"),
        (
            ["decision.per=rollouts", "decision.over=[0, 97]"],
            r"decision.*over.*got 97, but plain has at most 96 rollouts; end before, or raise its max_steps",
        ),
    ],
)
def test_windows_that_cannot_be_compared_are_refused(file: Path, overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        plan_runs(load_config(file, overrides), file.name)


@pytest.mark.parametrize("over", ["last", "whole"])
def test_runs_that_end_with_their_window_evaluate_at_its_end(file: Path, over: str) -> None:
    overrides = [f"decision.over={over}", "decision.metric=eval_reward", "decision.finish=true"]
    assert plan_runs(load_config(file, overrides), file.name).decision


@pytest.mark.parametrize("over", ['over = "whole"', "over = [1, 3]"])
def test_another_window_after_looks_is_refused(file: Path, over: str) -> None:
    directory = start(file, ["decision.max_seeds=3"]).execute().directory
    toml = CampaignFiles(directory).campaign_toml
    toml.write_text(toml.read_text().replace("[decision]", f"[decision]\n{over}"))
    with pytest.raises(ConfigError, match=r"decision.over: 'last' -> "):
        reopen(directory)
