"""`[decision] rungs`: conditions are looked at on the way, and go no further once they have a verdict."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from retrain.base.errors import EXIT_DONE, ConfigError
from retrain.campaign.run import reopen, start
from retrain.config.keys import Finish
from retrain.config.load import load_config
from retrain.plan.build import plan_runs
from retrain.plan.decision import decide
from retrain.plan.expected_seeds import Most, expected_seeds
from retrain.records.decision import Decision, Looks, lines_of, read_looks, value_key
from retrain.records.layout import CampaignFiles
from retrain.records.metrics import read_metrics
from retrain.records.run_row import RunRow
from retrain.records.run_state import read_attempts, read_done
from retrain.records.rungs import as_expected, read_wait
from retrain.records.windows import Window
from retrain.results.report.compare import compare
from retrain.results.report.sides import choose
from retrain.results.report.tables import excluded, footnotes
from tests.long.test_decision import DECISION, decision_of, stopped_after
from tests.stopping import IN_TWO_WORKERS, INLINE, finish_inline, killed_at

STEPS = 12
FILE = DECISION.replace("max_steps = 2", f"max_steps = {STEPS}").replace(
    "max_seeds = 8", 'max_seeds = 9\nover = "whole"\nrungs = [3, 6, 12]'
)
UNTIMED = ("step", "loss", "mean_reward", "entropy", "tokens_per_step", "grad_norm", "lr")


@pytest.fixture
def file(here: Path) -> Path:
    path = here / "rungs.toml"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign that nothing stopped; it is to be read."""
    directory = tmp_path_factory.mktemp("undisturbed")
    (directory / "rungs.toml").write_text(FILE)
    log_dir = f"logging.log_dir='{directory / 'logs'}'"
    return start(directory / "rungs.toml", [log_dir]).execute().directory


def rows_of(directory: Path) -> dict[str, list[tuple[object, ...]]]:
    """Return what was computed in each step of every run."""
    rows = {run.name: read_metrics(run) for run in (directory / "runs").iterdir()}
    return {name: [tuple(row[key] for key in UNTIMED) for row in its] for name, its in rows.items() if its}


def last_steps(directory: Path) -> dict[str, set[object]]:
    """Return at which steps the runs of each condition ended."""
    ends: dict[str, set[object]] = {}
    for name, rows in rows_of(directory).items():
        ends.setdefault(name.partition("_")[0], set()).add(rows[-1][0])
    return ends


def verdicts(decision: Decision) -> dict[str, tuple[str, float]]:
    return {one.condition: (one.verdict, one.rung) for one in decision.conditions}


def test_a_condition_goes_no_further_than_its_verdict(undisturbed: Path) -> None:
    found, ends = decision_of(undisturbed), last_steps(undisturbed)
    assert verdicts(found) == {"bonus": ("better", 3), "alike": ("no_difference", 12)}
    assert ends["bonus"] == {3}
    assert 12 in ends["alike"] | ends["plain"]
    by_hand = {
        f"{name}@3": statistics.fmean(row[2] for row in rows[:3])  # type: ignore[misc]
        for name, rows in rows_of(undisturbed).items()
    }
    looked_at = read_looks(CampaignFiles(undisturbed).looks).values
    assert {key: value for key, value in looked_at.items() if key.endswith("@3")} == pytest.approx(
        {key: by_hand[key] for key in looked_at if key.endswith("@3")}
    )
    done = read_done(CampaignFiles(undisturbed).run("bonus_s5").done)
    assert done is not None
    assert done.result == {"steps": 3, "dropped": "stopped at step 3: better than plain"}


def test_verdicts_say_to_which_step_they_hold(undisturbed: Path) -> None:
    bonus, alike, *_ = lines_of(decision_of(undisturbed))
    assert "better than plain in mean_reward over steps 1 to 3 after" in bonus
    assert bonus.endswith("what comes after is not compared, and curves may cross")
    assert "over steps 1 to 12 after" in alike
    assert "cross" not in alike
    assert re.search(r"runs? saved of 27, and [4-7]\d% of all steps", lines_of(decision_of(undisturbed))[-1])


def test_tables_compare_all_up_to_the_first_verdict(undisturbed: Path) -> None:
    comparison = compare(*choose([str(undisturbed)]), ["mean_reward"])
    bonus, alike = comparison.metrics[0].differences
    assert comparison.metrics[0].window == Window(start=0, end=3)
    assert (bonus.is_of_decision, alike.is_of_decision) == (True, False)
    assert any("hold at their rungs" in note for note in footnotes([comparison]))


def test_seeds_that_stopped_at_an_earlier_rung_shorten_no_table(file: Path) -> None:
    _, both = FILE.split("[[campaign.conditions]]", 1)
    alike = 'name = "plain"\n\n[[campaign.conditions]]\nname = "alike"\ntraining.lr = 2e-4\n'
    file.write_text(FILE.replace(both, f"\n{alike}"))
    directory = start(file, ["decision.rungs=[3, 12]"]).execute().directory
    assert verdicts(decision_of(directory)) == {"alike": ("no_difference", 12)}
    assert last_steps(directory) == {"plain": {3, 12}, "alike": {3, 12}}
    (metric,) = compare(*choose([str(directory)]), ["mean_reward"]).metrics
    assert (metric.window, metric.differences[0].is_of_decision) == (Window(start=0, end=12), True)
    assert [side.sample.n for side in metric.sides] == [3, 3]
    assert list(excluded(metric)) == ["plain, alike: of 5 runs each, 2 not far enough: left out"]


def test_a_promoted_run_has_the_rows_of_one_that_never_waited(undisturbed: Path, file: Path) -> None:
    plain = start(file, ["decision.rungs=[12]"]).execute().directory
    whole, rows = rows_of(plain), rows_of(undisturbed)
    shared = [name for name in rows if name in whole and not name.startswith("bonus")]
    assert len(shared) >= 6
    assert {name: rows[name] for name in shared} == {name: whole[name][: len(rows[name])] for name in shared}
    assert len(read_attempts(CampaignFiles(undisturbed).run("alike_s5").attempts)) == 3


@pytest.mark.parametrize("runs", [2, 7, 12, 18])
def test_a_stopped_campaign_comes_to_the_same_verdicts(undisturbed: Path, file: Path, runs: int) -> None:
    stopped = stopped_after(file, runs).directory
    CampaignFiles(stopped).manifest.unlink()
    assert reopen(stopped).execute().exit_code == EXIT_DONE
    assert decision_of(stopped) == decision_of(undisturbed)
    assert rows_of(stopped) == rows_of(undisturbed)


def steps_taken(directory: Path, steps: int) -> bool:
    lines = (path.read_text().count("\n") for path in directory.glob("logs/*/runs/*/metrics.jsonl"))
    return sum(lines) >= steps


def test_kills_change_no_verdict_and_no_row(undisturbed: Path, file: Path, here: Path) -> None:
    file.write_text(FILE.replace(INLINE, IN_TWO_WORKERS))
    directory = killed_at((10, 31, 60), steps_taken, file, here / "killed")
    finish_inline(directory)
    assert decision_of(directory) == decision_of(undisturbed)
    assert rows_of(directory) == rows_of(undisturbed)


def test_those_named_are_finished_once_there_are_verdicts(undisturbed: Path, file: Path) -> None:
    winner = start(file, ["decision.finish=reference and winner"]).execute().directory
    assert last_steps(winner)["plain"] == last_steps(winner)["bonus"] == {STEPS}
    found = replace(decision_of(undisturbed), saved_share=0.0)
    assert decision_of(winner) == found
    all_of_them = start(file, ["decision.finish=true"]).execute()
    assert set.union(*last_steps(all_of_them.directory).values()) == {STEPS}
    assert decision_of(all_of_them.directory) == found
    assert all_of_them.exit_code == EXIT_DONE


def test_rungs_of_what_is_spent(file: Path) -> None:
    dear = 'name = "alike"\ntraining.group_size = 8'
    file.write_text(FILE.replace('name = "alike"', dear))
    rungs = ["decision.per=tokens", "decision.rungs=[60, 150]", "decision.max_seeds=8"]
    directory = start(file, rungs).execute().directory
    tokens = {}
    for name, rows in rows_of(directory).items():
        spent = np.cumsum([row[4] for row in rows])
        assert len(spent) < 2 or spent[-2] < 150
        tokens[name] = spent[-1]
    assert verdicts(decision_of(directory))["bonus"] == ("better", 60)
    assert max(tokens[f"bonus_s{seed}"] for seed in (5, 7, 8)) < 150
    assert "over the first 60 sampled tokens after" in lines_of(decision_of(directory))[0]


def test_held_out_values_are_looked_at_at_each_rung(file: Path) -> None:
    held_out = ["decision.metric=eval_reward", "training.eval_every=3", "decision.over=last"]
    directory = start(file, held_out).execute().directory
    looked_at = read_looks(CampaignFiles(directory).looks).values
    rows = read_metrics(CampaignFiles(directory).run("plain_s5").directory)
    assert looked_at["plain_s5@3"] == rows[2]["eval_reward"]
    assert looked_at["plain_s5@6"] == rows[5]["eval_reward"]


def test_a_winner_of_a_search_is_compared_at_rungs(file: Path) -> None:
    search = '[campaign.search]\nmetric = "mean_reward"\nrungs = [4]\nkeep = 0.34\n\n[[campaign.conditions]]'
    file.write_text(FILE.replace("[[campaign.conditions]]", search, 1))
    outcome = start(file).execute()
    assert outcome.exit_code == EXIT_DONE
    assert verdicts(decision_of(outcome.directory)) == {"bonus": ("better", 3)}
    fresh = {name for name in rows_of(outcome.directory) if name.startswith("bonus")} - {
        "bonus_s5",
        "bonus_s7",
    }
    assert {rows_of(outcome.directory)[name][-1][0] for name in fresh} == {3}


def test_the_time_left_is_that_to_the_rung_that_is_open(undisturbed: Path) -> None:
    found = decision_of(undisturbed)
    bonus, alike = found.conditions
    live = replace(found, ended="", conditions=(bonus, replace(alike, verdict="continue", rung=6.0)))
    rows = [
        RunRow(run_id=f"{name}_s5", condition=name, seed=5, state="running", step=2, max_steps=STEPS)
        for name in ("plain", "bonus", "alike")
    ]
    assert [row.max_steps for row in as_expected(rows, None, live)] == [6, 2, 6]


def test_lost_files_are_found_again(undisturbed: Path, file: Path) -> None:
    stopped = stopped_after(file, 7).directory
    for path in stopped.glob("runs/*/rung.json"):
        path.write_text("{")
    assert reopen(stopped).execute().exit_code == EXIT_DONE
    assert decision_of(stopped) == decision_of(undisturbed)


def test_rungs_that_change_after_looks_are_told(file: Path) -> None:
    directory = start(file).execute().directory
    toml = CampaignFiles(directory).campaign_toml
    toml.write_text(toml.read_text().replace("rungs = [3, 6, 12]", "rungs = [4, 12]"))
    with pytest.raises(ConfigError, match=r"decision.rungs: \[3.0, 6.0, 12.0\] -> \[4.0, 12.0\]"):
        reopen(directory)
    assert reopen(directory, accept_config_change=True).execute().exit_code == EXIT_DONE
    found = decision_of(directory)
    assert verdicts(found)["bonus"] == ("better", 4)
    assert "decision.rungs" in found.changes[0]
    assert last_steps(directory)["bonus"] == {4}


def test_runs_that_ended_with_an_earlier_window_are_done_at_rungs_too(file: Path, undisturbed: Path) -> None:
    file.write_text(FILE.replace('over = "whole"\nrungs = [3, 6, 12]', "over = [1, 3]"))
    directory = start(file).execute().directory
    CampaignFiles(directory).campaign_toml.write_text(FILE)
    assert reopen(directory, accept_config_change=True).execute().exit_code == EXIT_DONE
    assert verdicts(decision_of(directory)) == verdicts(decision_of(undisturbed))


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["decision.rungs=[6, 3]"],
            r"decision.*rungs.*got \[6, 3\]; needs whole numbers of steps in asc",
        ),
        (["decision.rungs=[3, 3]"], r"each once"),
        (["decision.rungs=[0, 3]"], r"ascending order"),
        (["decision.rungs=[2.5, 3]"], r"whole numbers"),
        (
            ["decision.rungs=[3, 20]"],
            r"rungs.*got 20, but plain has 12 steps; end before, or raise its max_st",
        ),
        (["decision.over=[4, 12]"], r"in ascending order, each once after 4, where `over` begins"),
        (["decision.over=[1, 9]"], r"rungs.*ends at 12, and `over` at 9; needs the same end"),
        (["decision.allocate=auto"], r"allocate.*with rungs needs \"equal\""),
        (["decision.rungs=[]", "decision.finish=reference and winner"], r"finish.*needs rungs"),
        (["decision.metric=eval_reward"], r"rungs.*evaluates only at its end, past the rung at 3"),
        (
            ["decision.per=tokens", "decision.rungs=[9, 385]"],
            r"rungs.*got 385, but plain has at most 384 sam",
        ),
        (["decision.per=usd", "decision.rungs=[1, 2]"], r"decision.*per.*price"),
        (["decision.rungs=3"], r"rungs"),
        (["decision.finish=winner"], r'finish.*true, false or "reference and winner"'),
    ],
)
def test_rungs_that_cannot_be_looked_at_are_refused(file: Path, overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        plan_runs(load_config(file, overrides), file.name)


def found_with(file: Path, values: Mapping[tuple[str, int, float], float]) -> Decision:
    """Return what is decided once all values of (condition, seed, rung) are known."""
    plan = plan_runs(load_config(file), file.name)
    assert plan.decision is not None
    ids = {(run.condition, run.seed): run.run_id for run in plan.runs}
    known = {value_key(ids[name, seed], rung): value for (name, seed, rung), value in values.items()}
    return decide(plan, plan.decision, known, (), is_spent=False).decision


def test_the_first_seeds_alone_go_on_from_a_rung(file: Path) -> None:
    plan = plan_runs(load_config(file), file.name)
    assert plan.decision is not None
    gaps = dict(zip(plan.planned_seeds, (1.2, 1.4, 2.5, -3.8), strict=False))
    values = {
        value_key(run.run_id, 3): gaps[run.seed] if run.condition != "plain" else 0.0
        for run in plan.runs
        if run.seed in gaps
    }
    waits = decide(plan, plan.decision, values, (), is_spent=False).waits
    first = plan.planned_seeds[: plan.first_seeds]
    assert waits == {run.run_id: 6 if run.seed in first else 3 for run in plan.runs if run.seed in gaps}


def test_the_error_holds_over_all_rungs_and_conditions_however_they_correlate(file: Path) -> None:
    file.write_text(FILE.replace("reward.params.bonus = 0.5", "training.lr = 2e-3"))
    plan = plan_runs(load_config(file), file.name)
    rng, campaigns = np.random.default_rng(0), 150
    for correlation in (0.0, 0.9):
        wrong = 0
        for _ in range(campaigns):
            shape = (len(plan.conditions), len(plan.planned_seeds))
            whole = rng.normal(size=shape)
            values = {
                (name, seed, rung): float(
                    correlation * whole[i, j] + (1 - correlation**2) ** 0.5 * rng.normal()
                )
                for rung in (3, 6, 12)
                for (i, name), (j, seed) in product(enumerate(plan.conditions), enumerate(plan.planned_seeds))
            }
            found = found_with(file, values)
            wrong += any(one.verdict in ("better", "worse") for one in found.conditions)
        assert wrong <= 15  # of 150 at 5 %: more by chance once in 180 times, whatever follows is the test's


@pytest.mark.parametrize("finish", [True, "reference and winner"])
def test_no_run_is_finished_after_the_budget(file: Path, finish: Finish) -> None:
    plan = plan_runs(load_config(file), file.name)
    assert plan.decision is not None
    table = replace(plan.decision, finish=finish)
    values = {value_key(run.run_id, 3): float(run.condition == "bonus") for run in plan.runs[:9]}
    found = decide(plan, table, values, values.keys(), is_spent=True)
    assert found.decision.ended == "budget"
    assert (set(found.waits.values()), found.over.keys()) == ({3.0}, found.waits.keys())


def test_a_budget_that_ends_on_the_way_to_a_rung_leaves_no_claim_about_it(file: Path) -> None:
    plan = plan_runs(load_config(file), file.name)
    assert plan.decision is not None
    values = {value_key(run.run_id, 3): float(run.condition == "bonus") for run in plan.runs[:9]}
    asked = decide(plan, plan.decision, values, values.keys(), is_spent=False)
    before = Looks({}, asked.rounds)  # `alike` is equal at the first rung and goes on
    found = decide(plan, plan.decision, values, values.keys(), is_spent=True, before=before)
    bonus, alike, *_ = lines_of(found.decision)
    assert bonus.startswith("bonus: not decided against plain in mean_reward over steps 1 to 3 after 3 seeds")
    assert alike == "alike: not decided against plain in mean_reward over steps 1 to 6; not looked at"
    assert "cross" not in bonus


def test_explain_counts_the_runs_that_finish_to_their_ends(file: Path) -> None:
    """Conditions 2 standard deviations off are found at the first rungs, and then all or some runs go on."""
    plan = plan_runs(load_config(file), file.name)
    table = plan.decision
    assert table is not None
    finishes: tuple[Finish, ...] = (False, "reference and winner", True)
    far = [expected_seeds(Most(plan), replace(table, finish=f), file.parent / "none")[2] for f in finishes]
    runs, (stopped, winner, whole) = far[0].runs, [one.steps for one in far]
    assert stopped < runs * 6  # most of them before the second rung
    assert whole == pytest.approx(runs * STEPS)
    others = (whole - winner) / (STEPS - 3)  # runs that stop at the first rung, or some further on
    assert runs / 6 < others < runs / 3  # those of the condition that is neither reference nor winner


def test_a_rung_file_of_another_axis_holds_up_no_run(tmp_path: Path) -> None:
    path = tmp_path / "rung.json"
    path.write_text(json.dumps({"tokens": 150.5}))
    assert (read_wait(path), read_wait(path, "tokens")) == (0, 150.5)
