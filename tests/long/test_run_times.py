"""What records tell of time: a run's steps, start and end, and which runs are learnt from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from retrain.config.schema import BudgetSection
from retrain.plan.estimate.history import learn, of_runs, read_run_times
from retrain.plan.estimate.wall_time import learned_for
from retrain.plan.matrix import RunPlan
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.lines import append_line
from retrain.records.provenance import Provenance, write_provenance
from retrain.records.run_state import RunState, write_done
from retrain.records.spending import Spending, Tokens, write_spending
from tests import crowded
from tests.explained import SMOKE, explained, plan_of
from tests.recorded import at, record_campaign, record_run


def test_a_run_tells_its_steps_its_start_and_its_end(tmp_path: Path) -> None:
    run = plan_of(tmp_path).runs[0]
    files = RunFiles(tmp_path / "run")
    record_run(files, run, [5.0, *[2.0] * 9], startup_s=7.0, between_s=0.5, closing_s=3.0)
    found = read_run_times(files.directory)
    assert found is not None
    assert found.step_times_s == (2.0,) * 9  # the first step warms something up: that is start-up
    assert (found.startup_s, found.between_s, found.closing_s) == (7.0 + 5.0 - 2.0, 0.5, 3.0)


def test_waits_for_permits_are_taken_off_and_overlapping_ones_once(tmp_path: Path) -> None:
    run = plan_of(tmp_path).runs[0]
    fields = {"sample_time_s": 8.0, "train_time_s": 2.0, "permit_wait_s": 16.0, "permit_held_s": 24.0}
    record_run(RunFiles(tmp_path / "run"), run, [10.0] * 5, **fields)
    found = read_run_times(tmp_path / "run")
    assert found is not None
    assert found.parts.calls_at_once == 4
    assert found.step_times_s == (10.0 - 16.0 / 4,) * 4


def test_no_call_is_made_while_environments_are_waited_for(tmp_path: Path) -> None:
    run = plan_of(tmp_path).runs[0]
    fields = {"sample_time_s": 10.0, "environment_wait_s": 8.0, "permit_wait_s": 2.0, "permit_held_s": 6.0}
    record_run(RunFiles(tmp_path / "run"), run, [10.0] * 5, **fields)
    found = read_run_times(tmp_path / "run")
    assert found is not None
    assert found.parts.calls_at_once == 4  # in 2 s
    assert found.step_times_s == (10.0 - 2.0 / 4,) * 4


def test_what_an_api_paused_is_no_time_of_a_step(tmp_path: Path) -> None:
    run = plan_of(tmp_path).runs[0]
    files = RunFiles(tmp_path / "run")
    record_run(files, run, [2.0, 2.0, 2.0, 92.0, 2.0], permit_held_s=4.0, api_pause_s=0.0, api_pauses_s=0.0)
    rows = [json.loads(line) for line in files.metrics.read_text().splitlines()]
    rows[3] |= {"permit_held_s": 4.0 * 46, "api_pause_s": 90.0, "api_pauses_s": 90.0}
    rows[4] |= {"api_pauses_s": 90.0}
    files.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_run_times(files.directory)
    assert found is not None
    assert found.step_times_s == pytest.approx((2.0,) * 4)
    assert found.parts.permit_held_s == pytest.approx(4.0)


def test_a_run_that_took_one_step_tells_nothing(tmp_path: Path) -> None:
    run = plan_of(tmp_path).runs[0]
    record_run(RunFiles(tmp_path / "run"), run, [10.0])
    assert read_run_times(tmp_path / "run") is None


def test_a_damaged_run_is_left_out(tmp_path: Path) -> None:
    files = record_campaign(plan_of(tmp_path), "c-20250131T120000Z-0a1b", closing_s=0.0)
    files.run("a_s0").run_toml.write_text("torn = ")
    assert len(learn(tmp_path).runs) == 3


@pytest.mark.parametrize("text", ["run = 3", "training = 'none'", "[run]\ncondition = 7"])
def test_a_configuration_of_another_shape_troubles_nobody(tmp_path: Path, text: str) -> None:
    plan = plan_of(tmp_path)
    files = record_campaign(plan, "c-20250131T120000Z-0a1b", closing_s=0.0)
    files.run("a_s0").run_toml.write_text(text)
    assert explained(plan, learn(tmp_path)).wall_time is not None


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e300])
def test_times_that_no_clock_measured_trouble_nobody(tmp_path: Path, seconds: float) -> None:
    plan = plan_of(tmp_path)
    files = record_campaign(plan, "c-20250131T120000Z-0a1b", permit_held_s=seconds, closing_s=0.0)
    record_run(files.run("a_s0"), plan.runs[0], [1.0, seconds if seconds <= 0 else 1.0], train_time_s=seconds)
    assert explained(plan, learn(tmp_path)).wall_time is not None


def test_a_smoke_test_of_many_seeds_does_not_hide_the_pilot_before_it(tmp_path: Path) -> None:
    seeds = list(range(12))
    record_campaign(plan_of(tmp_path, seeds=seeds), "c-20250131T120000Z-0a1b", closing_s=0.0)
    smoke = plan_of(tmp_path, seeds=seeds, training={**SMOKE, "max_tokens": 4})
    record_campaign(smoke, "c-20250201T120000Z-0a1b", closing_s=0.0)
    found = explained(plan_of(tmp_path), learn(tmp_path)).wall_time
    assert found is not None
    assert {c.match for c in found.conditions} == {"same"}


def test_after_a_resume_only_what_the_new_attempt_warmed_up_is_left_out(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "run")
    record_run(files, plan_of(tmp_path).runs[0], [2.0] * 4)
    row = json.loads(files.metrics.read_text().splitlines()[-1])
    for step, seconds in ((5, 30.0), (6, 3.0), (7, 3.0)):
        again = {**row, "step": step, "attempt": 2, "step_time_s": seconds}
        files.metrics.write_text(files.metrics.read_text() + json.dumps(again) + "\n")
    begin = {"event": "begin", "attempt": 2, "started_at": row["timestamp"], "resumed_from_step": 4}
    files.attempts.write_text(files.attempts.read_text() + json.dumps(begin) + "\n")
    found = read_run_times(files.directory)
    assert found is not None
    assert found.step_times_s == (3.0, 3.0)


def test_failures_of_the_surroundings_are_learnt_per_hour_of_steps(tmp_path: Path) -> None:
    record_campaign(plan_of(tmp_path), "c-20250131T120000Z-0a1b", ending="infrastructure")
    assert learn(tmp_path).failures_per_hour == pytest.approx(4 / (4 * 40 / 3600))


def test_runs_of_a_condition_that_differ_are_noticed(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, seeds=[0, 1, 2, 3], conditions=[{"name": "a"}])
    for number, seconds in enumerate((0.8, 0.9, 1.1, 1.2)):
        record_run(CampaignFiles(tmp_path / "c").run(f"a_s{number}"), plan.runs[number], [seconds] * 21)
    runs = [run for path in (tmp_path / "c" / "runs").iterdir() if (run := read_run_times(path)) is not None]
    learned = learned_for(plan, of_runs(runs), cores=4.0)
    assert learned is not None
    between = 2 * (0.1**2 + 0.2**2) / 3  # what their steps explain is a twentieth of it
    assert learned.pilot.run_variance == pytest.approx(between, rel=0.06)


@pytest.mark.parametrize(("every", "between"), [(0, 0), (5, 1), (3, 3), (10, 0)])
def test_the_evaluation_of_the_last_step_is_counted_once(tmp_path: Path, every: int, between: int) -> None:
    plan = plan_of(tmp_path, steps=10, training={**SMOKE, "eval_every": every, "save_every": 0})
    record_campaign(plan, "c-20250131T120000Z-0a1b", closing_s=4.0, eval_time_s=4.0)
    learned = learned_for(plan, learn(tmp_path), cores=64.0)
    assert learned is not None
    assert learned.history.closing_s is not None
    took_s = 10 * learned.conditions["a"].cost.seconds + learned.history.closing_s
    assert took_s == pytest.approx(10 * 1.0 + between * 4.0 + 4.0)


def test_evaluations_of_their_own_are_counted_as_often_as_they_are_due(tmp_path: Path) -> None:
    evals = [{"name": "hard", "every": 3}, {"name": "final", "every": 0}]
    plan = plan_of(tmp_path, steps=10, training={**SMOKE, "save_every": 5}, evals=evals)
    closing_s = 4.0 + 2.0 + 1.0  # the last evaluations and a checkpoint
    name = "c-20250131T120000Z-0a1b"
    record_campaign(plan, name, closing_s=closing_s, eval_hard_time_s=4.0, eval_final_time_s=2.0)
    learned = learned_for(plan, learn(tmp_path), cores=64.0)
    assert learned is not None
    assert learned.history.closing_s is not None
    took_s = 10 * learned.conditions["a"].cost.seconds + learned.history.closing_s
    assert took_s == pytest.approx(10 * 1.0 + 3 * 4.0 + 1.0 + closing_s)


@pytest.mark.parametrize(("eval_every", "save_every"), [(1, 0), (2, 0), (1, 2), (1, 1), (0, 1)])
def test_what_comes_after_each_step_is_counted_once(tmp_path: Path, eval_every: int, save_every: int) -> None:
    """A row has the time at its step's end; its evaluation and a checkpoint follow."""
    training = {**SMOKE, "eval_every": eval_every, "save_every": save_every}
    plan = plan_of(tmp_path, steps=10, training=training, conditions=[{"name": "a"}], seeds=[0])
    files = record_campaign(plan, "c-20250131T120000Z-0a1b").run("a_s0")
    rows, now_s = [], 0.0
    for row in map(json.loads, files.metrics.read_text().splitlines()):
        step, now_s = row["step"], now_s + 1.0
        is_evaluated = bool(eval_every) and step % eval_every == 0
        rows.append(row | {"timestamp": at(now_s)} | ({"eval_time_s": 4.0} if is_evaluated else {}))
        now_s += 4.0 * (is_evaluated or step == 10)
        now_s += 2.0 * (step == 10 or (bool(save_every) and step % save_every == 0))
    files.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    append_line(
        files.attempts, {"event": "end", "attempt": 1, "ending": RunState.DONE, "ended_at": at(now_s)}
    )
    write_done(files.done, plan.runs[0].config_hash, {"eval_time_s": 4.0})
    learned = learned_for(plan, learn(tmp_path), cores=64.0)
    assert learned is not None
    assert learned.history.closing_s is not None
    assert 10 * learned.conditions["a"].cost.seconds + learned.history.closing_s == pytest.approx(now_s)


def record_launched(logs: Path, name: str, launcher: str, launch_s: float) -> None:
    plan = plan_of(logs, parallel=True, max_workers=2)
    runs = crowded.simulate(plan, cores=8.0, launch_s=launch_s, cv=0.0)
    files = crowded.record(plan, runs, name, crowded.end_s(runs), 8.0)
    write_provenance(files, Provenance(plan.name, (), "", None, launcher, ""))


@pytest.mark.parametrize(("launcher", "launch_s"), [("slurm", 90.0), ("local", 0.5)])
def test_a_launchers_latency_is_learnt_from_campaigns_of_that_launcher(
    tmp_path: Path, launcher: str, launch_s: float
) -> None:
    record_launched(tmp_path, "c-20250131T120000Z-0a1b", "local", 0.5)
    record_launched(tmp_path, "c-20250131T130000Z-0a1b", "slurm", 90.0)
    plan = plan_of(tmp_path, parallel=True, max_workers=2, launcher=launcher)
    time = explained(plan, learn(tmp_path)).wall_time
    assert time is not None
    assert time.startup_s == pytest.approx(launch_s + 2.0)
    assert time.p50_s == pytest.approx(2 * (launch_s + 2.0 + 40.0 + 0.5), rel=0.02)  # two waves


def test_a_launcher_that_was_never_used_has_an_unknown_latency(tmp_path: Path) -> None:
    record_launched(tmp_path, "c-20250131T120000Z-0a1b", "local", 0.5)
    time = explained(plan_of(tmp_path, launcher="slurm"), learn(tmp_path)).wall_time
    assert time is not None
    assert time.startup_s == pytest.approx(2.0)
    assert any("from submission to start is not included" in note for note in time.notes)


@pytest.mark.parametrize(
    ("name", "before", "damaged"),
    [
        ("metrics.jsonl", '"attempt": 1, ', ""),
        ("metrics.jsonl", '"step_time_s": 1.0', '"step_time_s": 1e308'),
        ("metrics.jsonl", '"prefill_tokens": 5', f'"prefill_tokens": 1{"0" * 400}'),
        ("spend.json", '"prefill": 5', f'"prefill": 1{"0" * 400}'),
        ("run.toml", "max_staleness = 0", "max_staleness = {}"),
    ],
)
def test_values_that_no_run_has_trouble_nobody(tmp_path: Path, name: str, before: str, damaged: str) -> None:
    plan = plan_of(tmp_path)
    counts = dict.fromkeys(("prefill_tokens", "cached_tokens", "sampled_tokens", "trained_tokens"), 5)
    files = record_campaign(plan, "c-20250131T120000Z-0a1b", closing_s=0.0, eval_time_s=0.5, **counts)
    write_spending(files.run("a_s0"), Spending(Tokens(5)))
    path = files.run("a_s0").directory / name
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, damaged))
    priced = replace(plan, runs=tuple(map(_priced, plan.runs)))
    assert explained(priced, learn(tmp_path)).wall_time is not None


def _priced(run: RunPlan) -> RunPlan:
    return replace(run, config=replace(run.config, budget=BudgetSection(prices={"numpy": {"prefill": 1.0}})))
