"""`[campaign.search]`: who goes on at which rung, what is needed next, and every mistake."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from retrain.base.errors import ConfigError
from retrain.campaign.calibrate import Calibrator
from retrain.campaign.calibrate.benchmarks import Effort
from retrain.config.keys import Proposal
from retrain.config.load import load_config, parse
from retrain.config.schema import SearchSection
from retrain.plan.build import plan_runs
from retrain.plan.expected_seeds import Most, ends_too_early
from retrain.plan.matrix import Plan, RunPlan
from retrain.plan.search import WON, Climb, climb, fresh_plan, most_runs, stages_of
from retrain.records.layout import RunFiles
from retrain.records.lines import append_line, read_records
from retrain.records.run_row import RunEntry, RunRow, read_run
from retrain.records.run_state import RunState, begin_attempt, end_attempt, rung_of
from retrain.records.rungs import (
    Proposed,
    Rung,
    Searched,
    as_decided,
    as_expected,
    is_settled,
    lines_of_search,
    read_proposals,
    read_wait,
    why_to_wait,
    write_wait,
)
from retrain.results.status import campaign_state, summarize
from tests.explained import explained

FILE = """
[training]
max_steps = 30
batch_size = 2
group_size = 4
max_tokens = 4
[campaign]
seeds = [0, 1]
[campaign.sweep]
training.lr = [1e-4, 1e-3, 1e-2, 1e-1]
[campaign.search]
rungs = [10, 20]
[decision]
metric = "mean_reward"
max_seeds = 6
"""
LR = {f"maxrl lr={lr}": lr for lr in (0.0001, 0.001, 0.01, 0.1)}


def planned(tmp_path: Path, text: str = FILE, *overrides: str, added_seeds: int = 0) -> Plan:
    file = tmp_path / "c.toml"
    file.write_text(text)
    return plan_runs(load_config(file, overrides), "c.toml", added_seeds=added_seeds)


def climbed(plan: Plan, at: dict[str, int], known: tuple[Rung, ...] = (), **failed: None) -> Climb:
    """Climb with runs that are at these steps, and worth their learning rate; failed ones have no value."""
    assert plan.campaign.search is not None

    def value_at(run: RunPlan, step: int) -> tuple[bool, float | None]:
        if run.run_id in failed:
            return True, None
        return at.get(run.run_id, 0) >= (step or run.max_steps), run.config.training.lr + run.seed

    return climb(plan, plan.campaign.search, known, value_at)


def test_all_run_to_the_first_rung_on_the_same_seeds(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    there = plan.runs[0].run_id
    found = climbed(plan, {there: 10})
    assert found.waits == {run.run_id: 10 for run in plan.runs if run.seed < 2 and run.run_id != there}
    assert (found.over, found.rungs, found.winner) == ({}, (), "")


def test_the_better_part_goes_on_and_the_others_are_over_with_the_reason(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    found = climbed(plan, {run.run_id: 10 for run in plan.runs})
    assert found.waits == {f"maxrl-lr-{lr}_s{seed}": 20 for lr in (0.01, 0.1) for seed in (0, 1)}
    assert found.rungs[0].kept == ("maxrl lr=0.1", "maxrl lr=0.01")
    assert found.rungs[0].scores["maxrl lr=0.1"] == pytest.approx(0.6)
    assert found.over["maxrl-lr-0.001_s1"] == "dropped at step 10: mean_reward 0.501; 2 of 4 went on"
    assert set(found.over) == {f"maxrl-lr-{lr}_s{seed}" for lr in (0.0001, 0.001) for seed in (0, 1)}


def test_a_single_condition_left_has_won_and_need_not_run_on(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    found = climbed(plan, {run.run_id: 20 for run in plan.runs})
    assert (found.waits, found.winner) == ({}, "maxrl lr=0.1")
    assert found.over["maxrl-lr-0.1_s0"] == WON


def test_several_that_are_left_run_to_their_ends(tmp_path: Path) -> None:
    plan = planned(tmp_path, FILE, "campaign.search.rungs=[10]")
    found = climbed(plan, {run.run_id: 10 for run in plan.runs})
    assert set(found.waits.values()) == {0}
    ended = climbed(plan, {run.run_id: 30 for run in plan.runs}, found.rungs)
    assert ended.winner == "maxrl lr=0.1"
    assert [one.step for one in ended.rungs] == [10, 30]
    assert "maxrl-lr-0.01_s0" not in ended.over  # it is done anyway


def test_of_times_the_lower_are_better(tmp_path: Path) -> None:
    plan = planned(tmp_path, FILE, "campaign.search.metric=step_time_s")
    assert climbed(plan, {run.run_id: 10 for run in plan.runs}).rungs[0].kept[0] == "maxrl lr=0.0001"


def test_a_condition_of_which_a_run_failed_comes_last(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    found = climbed(plan, {run.run_id: 10 for run in plan.runs}, **{"maxrl-lr-0.1_s1": None})
    assert found.rungs[0].kept == ("maxrl lr=0.01", "maxrl lr=0.001")
    assert found.rungs[0].scores["maxrl lr=0.1"] is None
    assert found.over["maxrl-lr-0.1_s0"] == "dropped at step 10: no value; 2 of 4 went on"


def test_what_decided_among_equal_conditions_is_told() -> None:
    first = Rung(10, {"a": 0.5, "b": 0.7, "c": 0.5, "d": 0.5}, ("b", "a"))
    found = Searched("mean_reward", "a", (0,), (first, Rung(20, {"b": 0.9, "a": 0.9}, ("b",))))
    assert list(lines_of_search(found)) == [
        "search, step 10: 2 of 4 conditions went on; best: b, mean_reward 0.700; "
        "3 conditions were equal, so the file's order decided",
        "search, step 20: 1 of 2 conditions went on; best: b, mean_reward 0.900; "
        "2 conditions were equal, so their rank at the rung before decided",
    ]
    clear = replace(found, rungs=(Rung(10, {"a": 0.5, "b": 0.5, "c": 0.1}, ("a", "b")),))
    assert "equal" not in next(lines_of_search(clear))


@pytest.mark.parametrize(
    ("winner", "line"),
    [
        ("b", "search: b won, compared with a on fresh seeds (seeds 0, 1 chose it, so others decide)"),
        ("a", "search: a won; it is the reference, so no fresh seeds compare it"),
    ],
)
def test_a_winner_runs_on_fresh_seeds_unless_it_is_the_reference(winner: str, line: str) -> None:
    assert list(lines_of_search(Searched("mean_reward", "a", (0, 1), (), winner))) == [line]


def test_a_rung_that_was_decided_stands(tmp_path: Path) -> None:
    plan, scores = planned(tmp_path), dict.fromkeys(LR, 0.5)
    known = (Rung(10, scores, ("maxrl lr=0.0001", "maxrl lr=0.001")),)
    found = climbed(plan, {run.run_id: 20 for run in plan.runs}, known)
    assert found.winner == "maxrl lr=0.001"
    append_line(tmp_path / "search.jsonl", asdict(known[0]))
    with (tmp_path / "search.jsonl").open("a") as file:
        file.write('{"step": 20, "scores": {}, "kept": []}\n{"torn')
    assert read_records(tmp_path / "search.jsonl", Rung) == known


def test_rungs_that_are_changed_between_two_of_them_apply_to_the_steps_ahead(tmp_path: Path) -> None:
    known = (Rung(10, dict.fromkeys(LR, 0.5), ("maxrl lr=0.0001", "maxrl lr=0.001")),)
    for rungs, ahead in (("[15]", 15), ("[5, 10, 20]", 20), ("[5]", 0)):
        plan = planned(tmp_path, FILE, f"campaign.search.rungs={rungs}")
        found = climbed(plan, {run.run_id: 10 for run in plan.runs}, known)
        assert set(found.waits.values()) == {ahead}
        assert "dropped at step 10" in found.over["maxrl-lr-0.1_s0"]


def test_only_seeds_that_chose_neither_decide(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    fresh = fresh_plan(plan, "maxrl lr=0.1")
    assert fresh.conditions == ("maxrl lr=0.0001", "maxrl lr=0.1")
    assert (fresh.planned_seeds, plan.search_seeds) == ((2, 3, 4, 5, 6, 7), (0, 1))
    assert (fresh.reference, fresh.first_seeds) == ("maxrl lr=0.0001", 3)
    named = planned(tmp_path, FILE, "decision.reference=maxrl lr=0.01")
    assert fresh_plan(named, "maxrl lr=0.1").reference == "maxrl lr=0.01"


def test_without_a_decision_table_its_defaults_decide_in_the_metric_of_the_search(tmp_path: Path) -> None:
    plan = planned(tmp_path, FILE.partition("[decision]")[0])
    assert plan.decision is not None
    assert (plan.decision.metric, plan.decision.max_seeds) == ("mean_reward", 12)


def test_explain_counts_the_steps_that_a_search_takes(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    found = explained(plan, None)
    assert found.search == (
        "4 conditions x 2 seeds to step 10",
        "2 conditions x 2 seeds to step 20",
        "winner and maxrl lr=0.0001: 3 to 6 fresh seeds, which decide",
    )
    assert found.total_campaign_steps == 2 * 2 * 10 + 2 * 2 * 20 + 2 * 6 * 30
    for one in found.expected_seeds:  # the search runs whatever it finds, each fresh seed is two whole runs
        assert 3 <= one.seeds <= 6
        assert one.runs == pytest.approx(8 + 2 * one.seeds)
        assert one.steps == pytest.approx(120 + 60 * one.seeds)
    equal, _, twice = found.expected_seeds
    assert (equal.unit, twice.difference) == ("SD", 2.0)
    assert "--set campaign.max_steps=21 " in found.pilot_command  # above the last rung
    assert (
        sum(run.max_steps for run in most_runs(plan, SearchSection(rungs=[10], keep=0.5))) == 40 + 120 + 360
    )


def test_a_budget_that_ends_before_the_fresh_seeds_can_decide_is_told(tmp_path: Path) -> None:
    """At a dollar a step: the search, then six seeds of two conditions with 30 steps, whose last is begun."""
    plan = planned(tmp_path)
    assert plan.decision is not None
    assert plan.campaign.search is not None
    costly = replace(plan, runs=most_runs(plan, plan.campaign.search))
    searching, most = costly.total_steps - 6 * 2 * 30, Most(costly, cost_usd=float(costly.total_steps))
    enough = replace(plan.decision, budget_usd=searching + 5 * 2 * 30.0)
    assert ends_too_early(most, enough) == ""
    told = ends_too_early(most, replace(enough, budget_usd=searching + 5 * 2 * 30.0 - 1))
    assert f"needs the search and 6 seeds of 2 conditions and takes about ${costly.total_steps}.00" in told


def test_a_search_changes_no_run(tmp_path: Path) -> None:
    with_search, without = planned(tmp_path), planned(tmp_path, FILE.replace("[campaign.search]\nrungs", "#"))
    hashes = {run.run_id: run.config_hash for run in without.runs}
    assert {run.run_id: run.config_hash for run in with_search.runs}.items() >= hashes.items()


def test_a_run_waits_from_its_rung_on(tmp_path: Path) -> None:
    path = tmp_path / "rung.json"
    assert write_wait(path, 10)
    assert not write_wait(path, 10)
    assert [bool(why_to_wait(path, step)) for step in (0, 9, 10, 11)] == [False, False, True, True]
    assert rung_of(f"stopped after step 11: {why_to_wait(path, 11)}; a checkpoint was saved") == "10"
    assert rung_of("stopped after step 11; a checkpoint was saved") == ""
    assert write_wait(path, 0)
    assert (read_wait(path), why_to_wait(path, 30)) == (0, "")


def row(condition: str, step: int, *, seed: int = 0, state: str = "waiting") -> RunRow:
    run_id = f"{condition}_s{seed}"
    return RunRow(run_id=run_id, condition=condition, seed=seed, state=state, step=step, max_steps=30)


def test_as_many_runs_as_go_on_are_expected_to(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert plan.campaign.search is not None
    found = Searched("mean_reward", "a", (0,), stages=tuple(stages_of(plan, plan.campaign.search)))
    assert found.stages == ((4, 10), (2, 20))
    first = [row(name, 4, state="running") for name in "abcd"]
    assert [one.max_steps for one in as_expected(first, found)] == [20, 20, 10, 10]

    at_rung = replace(found, rungs=(Rung(10, dict.fromkeys("abcd", 0.5), ("d", "b")),))
    second = [row(name, 10) for name in "abcd"]
    assert [one.steps_left for one in as_expected(second, at_rung)] == [0, 10, 0, 10]

    over = [row("a", 10), row("d", 20), row("d", 0, seed=1, state="pending")]
    won = replace(at_rung, winner="d")
    assert [one.steps_left for one in as_expected(over, won)] == [0, 0, 30]  # a fresh seed runs to its end
    assert as_expected(over, None) == over


def test_a_run_that_waits_is_not_shown_as_interrupted(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "a_s0")
    files.directory.mkdir()
    shown = []
    for message in ("stopped after step 10: it waits at rung 10 until", "stopped after step 10"):
        number = begin_attempt(files.attempts)
        end_attempt(files.attempts, number, RunState.INTERRUPTED, message=message)
        found = read_run(RunEntry("a_s0", "a", 0, 30), files).row
        shown.append((found.state, found.phase, found.ended_badly, found.message))
    assert shown == [("waiting", "at rung 10", False, ""), ("interrupted", "", False, "")]
    waits = row("a", 10)
    assert campaign_state([waits], is_supervised=False) == "interrupted"


def test_a_run_that_goes_on_is_pending_until_it_starts() -> None:
    rungs = [Rung(step, dict.fromkeys("ab", 0.5), ("a",)) for step in (10, 20)]
    found = Searched("mean_reward", "a", (0,), (rungs[0],))
    waits = replace(row("a", 11), phase="at rung 10")
    on = as_decided(waits, found)
    assert (on.state, on.phase) == ("pending", "after rung 10")
    for other in (replace(waits, condition="b"), replace(waits, phase="at rung 20")):
        assert as_decided(other, found) is other
    assert as_decided(waits, None) is waits
    dropped = replace(row("b", 10, state="done"), max_steps=30)
    assert as_decided(dropped, found).phase == "dropped"
    assert as_decided(replace(dropped, step=30), found).phase == ""
    assert as_decided(replace(dropped, condition="a"), replace(found, winner="a")).phase == "won"
    assert as_decided(waits, replace(found, rungs=tuple(rungs))) == on  # resumed much later


def test_the_reward_of_a_winner_is_that_of_seeds_that_did_not_choose_it() -> None:
    found = Searched("mean_reward", "a", (0,), winner="b")
    lucky = [replace(row(name, 30, state="done"), reward_mean=0.9) for name in "abc"]
    fresh = [replace(row(name, 30, seed=1, state="done"), reward_mean=0.5) for name in "ab"]
    rows = summarize([*lucky, *fresh], found)
    assert [one.reward_of for one in rows] == [*["1 fresh seed, step 30"] * 2, "1 seed, step 30"]
    rewards = {one.condition: one.reward_mean for one in rows}
    assert rewards == {"a": 0.5, "b": 0.5, "c": 0.9}
    assert [one.reward_mean for one in summarize([*lucky, *fresh])] == [0.7, 0.7, 0.9]


def test_a_search_is_settled_when_its_winner_is_decided_about(tmp_path: Path) -> None:
    found = Searched("mean_reward", "a", (0, 1))
    assert not is_settled(found, None)
    assert is_settled(replace(found, winner="a"), None)  # the reference: nothing to decide
    assert not is_settled(replace(found, winner="b"), None)
    assert is_settled(None, None)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("campaign.search.rungs=[20, 10]", ".rungs: got [20, 10]; needs steps in ascending order, each once"),
        ("campaign.search.rungs=[10, 10]", ".rungs: got [10, 10]; needs steps in ascending order, each once"),
        ("campaign.search.rungs=[10, 30]", ".rungs: got 30; needs steps below max_steps = 30 of maxrl lr=0."),
        ("campaign.search.metric=mean_rewad", '.metric: no row of maxrl lr=0.0001 will have "mean_rewad"'),
        (
            "campaign.search.metric=eval_reward",
            '.metric: no row of maxrl lr=0.0001 at step 10 will have "eval_reward"; evaluate there',
        ),
        ("campaign.search.rungs=[]", ".rungs: is missing; give the steps at which the worse conditions are"),
        ("campaign.search.trials=5", ".trials: got 5; has no effect without a sampler, such as optuna:tpe"),
        ("campaign.search.sampler=tpe", ".sampler: no sampler is named \"tpe\"; did you mean 'optuna:tpe'?"),
        (
            "campaign.search.sampler='optuna:'",
            '.sampler: no sampler is named "optuna:"; there are optuna:tpe, ',
        ),
        ("campaign.search.sampler=optuna:tpe", ".trials: is missing; give the number of points that"),
        (
            "campaign.search={ sampler = 'optuna:tpe', trials = 1000 }",
            ".trials: would be 14,014 runs; at most 10,000 can be planned: ask for fewer points or seeds",
        ),
    ],
)
def test_a_search_that_cannot_choose_is_refused(override: str, problem: str, tmp_path: Path) -> None:
    text = FILE.partition("[decision]")[0]
    with pytest.raises(ConfigError) as caught:
        planned(tmp_path, text, override)
    assert caught.value.problems[0].startswith(f"c.toml [campaign.search]{problem}")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["trials=4"], ".trials: got 4, and the lists have 4 combinations in all: give fewer, or remove the"),
        (["sampler=optuna:cmaes"], ".sampler: optuna:cmaes needs 2 ranges or more; lists and conditions it"),
        ([], ".sampler: 'optuna:tpe' needs the extra 'optuna' (optuna not found): pip install "),
    ],
)
def test_a_sampler_that_cannot_propose_is_refused(
    overrides: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)  # not installed
    given = [f"campaign.search.{one}" for one in ("sampler=optuna:tpe", "trials=3", *overrides)]
    with pytest.raises(ConfigError) as caught:
        planned(tmp_path, FILE, *given)
    assert caught.value.problems[0].startswith(f"c.toml [campaign.search]{problem}")


def test_a_sampler_that_has_proposed_all_need_not_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a search is resumed on another machine."""
    monkeypatch.setitem(sys.modules, "optuna", None)
    file = tmp_path / "c.toml"
    file.write_text(FILE)
    found = (Proposal({"training.lr": 0.01}, 1), Proposal({"training.lr": 0.1}, 1))
    for trials, is_needed in ((2, False), (3, True)):
        given = [f"campaign.search.{one}" for one in ("sampler=optuna:tpe", f"trials={trials}")]
        config = load_config(file, given, proposed=found)
        if is_needed:
            with pytest.raises(ConfigError, match="needs the extra 'optuna'"):
                plan_runs(config, "c.toml", proposed=2)
        else:
            assert len(plan_runs(config, "c.toml", proposed=2).proposed_conditions) == 2


def test_what_a_sampler_may_propose_is_checked_before_it_is_asked(tmp_path: Path) -> None:
    sweep = "campaign.sweep.training={ lr = { uniform = [-1.0, 1.0], samples = 3 }, batch_size = [4, 0] }"
    with pytest.raises(ConfigError) as caught:
        planned(tmp_path, FILE, "campaign.search.sampler=optuna:tpe", sweep)
    assert caught.value.problems == (
        'c.toml [campaign.sweep]."training.lr": samples: got 3; campaign.search.sampler proposes '
        "campaign.search.trials points; leave samples out",
    )
    with pytest.raises(ConfigError) as caught:
        planned(tmp_path, FILE, "campaign.search.sampler=optuna:tpe", sweep.replace(", samples = 3", ""))
    assert [one.partition(":")[0] for one in caught.value.problems] == [
        'c.toml [campaign.sweep]."training.lr"',
        'c.toml [campaign.sweep]."training.batch_size"',
    ]


def test_the_first_rung_is_decided_when_the_sampler_has_proposed_all(tmp_path: Path) -> None:
    plan, at_rung = planned(tmp_path), {f"maxrl-lr-{lr}_s{seed}": 10 for lr in LR.values() for seed in (0, 1)}
    table = SearchSection(rungs=[10, 20], sampler="optuna:tpe", trials=5)

    def value_at(run: RunPlan, step: int) -> tuple[bool, float | None]:
        return at_rung.get(run.run_id, 0) >= step > 0, run.config.training.lr

    def left(to_come: int) -> Climb:
        return climb(plan, table, (), value_at, to_come)

    assert left(5).due == {}  # nothing is known yet, and nothing is waited for
    assert (left(2).due, left(2).rungs) == (LR, ())
    assert (left(0).due, left(0).rungs[0].step) == (None, 10)
    missing = at_rung.pop("maxrl-lr-0.1_s1") and "maxrl-lr-0.1_s1"
    assert (left(2).due, left(2).waits) == (None, {missing: 10})


def test_what_a_sampler_proposed_is_told(tmp_path: Path) -> None:
    found = Searched("mean_reward", "a", (0,), sampler="optuna:tpe", proposed=4, to_come=8)
    assert list(lines_of_search(found)) == ["search: optuna:tpe proposed 4 conditions, 8 more follow"]
    path, rounds = tmp_path / "proposals.jsonl", (Proposed({"a": 0.5, "b": None}, (Proposal({"k": 1}, 2),)),)
    append_line(path, asdict(rounds[0]))
    with path.open("a") as file:
        file.write('{"told": {}, "proposals": [{"number": 1}]}\n{"torn')
    assert read_proposals(path) == rounds


def test_wrong_keys_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(
            tmp_path, FILE, "campaign.search.keep=1.0", "campaign.search.rungs=[0]", "campaign.search.rung=1"
        )
    assert caught.value.problems == (
        "c.toml [campaign.search].rungs #1: got 0; needs at least 1",
        "--set campaign.search.keep: got 1.0; needs less than 1",
        "--set campaign.search.rung: unknown key; did you mean 'rungs'?",
    )


def test_evaluations_at_the_rungs_may_rank(tmp_path: Path) -> None:
    plan = planned(tmp_path, FILE, "campaign.search.metric=eval_reward", "training.eval_every=5")
    assert plan.campaign.search is not None


def test_a_search_needs_conditions_to_choose_among(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"c\.toml \[campaign\]\.search: chooses among"):
        planned(tmp_path, FILE.partition("[decision]")[0], "campaign.sweep.training.lr=[1e-4]")


def test_seeds_are_not_added_by_hand(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"raise decision\.max_seeds"):
        planned(tmp_path, added_seeds=2)


def test_calibration_measures_the_conditions_of_a_sweep_without_the_search(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(FILE)
    calibrator = Calibrator(file, (), Effort())
    benchmarks = list(calibrator.benchmarks(tmp_path / "benchmarks"))
    plans = {each.name: plan_runs(parse(each.tables, "benchmark")) for each in benchmarks}
    assert plans["pilot"].conditions == tuple(LR)
    assert plans["pilot"].campaign.search is None
    assert len(plans["batch"].conditions) == 1
