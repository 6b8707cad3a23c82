"""What `explain` learns from earlier runs, what it says when there are none, and its checklist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from retrain.config.load import parse, sets_key
from retrain.plan.checklist import Check
from retrain.plan.explain import Explanation, explain_plan
from retrain.plan.history import History, learn, of_runs
from retrain.plan.learned import learned_for
from retrain.plan.matrix import Plan, plan_runs
from retrain.plan.measured import measure_run
from retrain.plan.preflight import preflight
from retrain.plan.warnings import warnings_of
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.manifest import Expectation
from tests.recorded import record_campaign, record_run

SMOKE = {"batch_size": 2, "group_size": 8, "max_tokens": 16}


def _plan(logs: Path, *, steps: int = 40, training: dict[str, Any] | None = None, **campaign: Any) -> Plan:
    raw = {
        "training": training or SMOKE,
        "logging": {"log_dir": str(logs)},
        "campaign": {
            "seeds": [0, 1],
            "max_steps": steps,
            "conditions": [{"name": "a"}, {"name": "b", "advantage_mode": "grpo"}],
            **campaign,
        },
    }
    return plan_runs(parse(raw, "c.toml"), "c.toml")


def _explain(plan: Plan, history: History | None, **options: Any) -> Explanation:
    return explain_plan(plan, preflight(plan, "c.toml"), history, 2.0, "c.toml", **options)


def _line(explanation: Explanation, question: str) -> Check:
    return next(line for line in explanation.checklist if line.question == question)


def test_without_a_pilot_it_says_what_is_unknown_and_how_to_get_it(tmp_path: Path) -> None:
    found = _explain(_plan(tmp_path), None)
    assert found.wall_time is None
    assert "step times of each condition" in found.unknown
    assert found.pilot_command == (
        f"retrain c.toml --set campaign.max_steps=20 && retrain explain c.toml --from {tmp_path}"
    )


def test_a_run_tells_its_steps_its_start_and_its_end(tmp_path: Path) -> None:
    run = _plan(tmp_path).runs[0]
    files = RunFiles(tmp_path / "run")
    record_run(files, run, [5.0, *[2.0] * 9], startup_s=7.0, between_s=0.5, closing_s=3.0)
    found = measure_run(files.directory)
    assert found is not None
    assert found.step_times_s == (2.0,) * 9  # the first step warms something up: that is start-up
    assert (found.startup_s, found.between_s, found.closing_s) == (7.0 + 5.0 - 2.0, 0.5, 3.0)


def test_waits_for_permits_are_taken_off_and_overlapping_ones_once(tmp_path: Path) -> None:
    run = _plan(tmp_path).runs[0]
    fields = {"sample_time_s": 8.0, "train_time_s": 2.0, "permit_wait_s": 16.0, "permit_held_s": 24.0}
    record_run(RunFiles(tmp_path / "run"), run, [10.0] * 5, **fields)
    found = measure_run(tmp_path / "run")
    assert found is not None
    assert found.parts.calls_at_once == 4
    assert found.step_times_s == (10.0 - 16.0 / 4,) * 4


def test_a_run_that_took_one_step_tells_nothing(tmp_path: Path) -> None:
    run = _plan(tmp_path).runs[0]
    record_run(RunFiles(tmp_path / "run"), run, [10.0])
    assert measure_run(tmp_path / "run") is None


def test_an_estimate_adds_start_and_end_to_the_steps_of_each_condition(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    times = {"a": [1.0] * 21, "b": [2.0] * 21}
    record_campaign(plan, "c-20250131T120000Z-0a1b", step_times_s=times, startup_s=10.0, closing_s=0.0)
    found = _explain(plan, learn(tmp_path)).wall_time
    assert found is not None
    assert found.p50_s == pytest.approx(2 * (40 * 1 + 40 * 2) + 4 * 10.0)
    assert found.rule_of_thumb_s == 160 * 1.5
    assert (found.measured_runs, found.limited_by) == (4, "workers")


def test_evaluations_and_checkpoints_of_the_plan_are_counted_as_often_as_they_come(tmp_path: Path) -> None:
    plan = _plan(tmp_path, training={**SMOKE, "save_every": 10})
    record_campaign(plan, "c-20250131T120000Z-0a1b", step_times_s={}, closing_s=5.0)
    learned = learned_for(plan, learn(tmp_path), cores=2.0)
    assert learned is not None
    assert learned.conditions["a"].cost.seconds == pytest.approx(1.0 + 5.0 / 10)


def test_runs_of_a_condition_that_differ_are_noticed(tmp_path: Path) -> None:
    plan = _plan(tmp_path, seeds=[0, 1, 2, 3], conditions=[{"name": "a"}])
    for number, seconds in enumerate((0.8, 0.9, 1.1, 1.2)):
        record_run(CampaignFiles(tmp_path / "c").run(f"a_s{number}"), plan.runs[number], [seconds] * 21)
    learned = learned_for(plan, of_runs((tmp_path / "c" / "runs").iterdir()), cores=2.0)
    assert learned is not None
    between = 2 * (0.1**2 + 0.2**2) / 3  # what their steps explain is a twentieth of it
    assert learned.pilot.run_variance == pytest.approx(between, rel=0.06)


def test_a_condition_that_was_never_measured_borrows_and_says_so(tmp_path: Path) -> None:
    one = _plan(tmp_path, conditions=[{"name": "a"}])
    record_campaign(one, "c-20250131T120000Z-0a1b", closing_s=0.0)
    found = _explain(_plan(tmp_path), learn(tmp_path)).wall_time
    assert found is not None
    assert [c.match for c in found.conditions] == ["same", "other condition"]
    assert any("b was never measured itself" in note for note in found.notes)


def test_other_settings_are_named(tmp_path: Path) -> None:
    record_campaign(_plan(tmp_path), "c-20250131T120000Z-0a1b", closing_s=0.0)
    found = _explain(_plan(tmp_path, training={**SMOKE, "batch_size": 4}), learn(tmp_path))
    assert found.wall_time is not None
    assert found.wall_time.conditions[0].differs == ("training.batch_size = 2, not 4",)
    assert _line(found, "pilot confirms throughput").state == "warn"


def test_runs_of_the_same_settings_are_preferred_to_newer_ones(tmp_path: Path) -> None:
    record_campaign(_plan(tmp_path), "c-20250131T120000Z-0a1b", closing_s=0.0)
    other = _plan(tmp_path, training={**SMOKE, "max_tokens": 4})
    times = {"a": [9.0] * 21, "b": [9.0] * 21}
    record_campaign(other, "c-20250201T120000Z-0a1b", step_times_s=times, closing_s=0.0)
    found = _explain(_plan(tmp_path), learn(tmp_path)).wall_time
    assert found is not None
    assert found.median_step_time_s == 1.0


def test_a_damaged_run_is_left_out(tmp_path: Path) -> None:
    files = record_campaign(_plan(tmp_path), "c-20250131T120000Z-0a1b", closing_s=0.0)
    files.run("a_s0").run_toml.write_text("torn = ")
    assert len(learn(tmp_path).runs) == 3


@pytest.mark.parametrize("text", ["run = 3", "training = 'none'", "[run]\ncondition = 7"])
def test_a_configuration_of_another_shape_troubles_nobody(tmp_path: Path, text: str) -> None:
    plan = _plan(tmp_path)
    files = record_campaign(plan, "c-20250131T120000Z-0a1b", closing_s=0.0)
    files.run("a_s0").run_toml.write_text(text)
    assert _explain(plan, learn(tmp_path)).wall_time is not None


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e300])
def test_times_that_no_clock_measured_trouble_nobody(tmp_path: Path, seconds: float) -> None:
    plan = _plan(tmp_path)
    files = record_campaign(plan, "c-20250131T120000Z-0a1b", permit_held_s=seconds, closing_s=0.0)
    record_run(files.run("a_s0"), plan.runs[0], [1.0, seconds if seconds <= 0 else 1.0], train_time_s=seconds)
    assert _explain(plan, learn(tmp_path)).wall_time is not None


def test_a_smoke_test_of_many_seeds_does_not_hide_the_pilot_before_it(tmp_path: Path) -> None:
    seeds = list(range(12))
    record_campaign(_plan(tmp_path, seeds=seeds), "c-20250131T120000Z-0a1b", closing_s=0.0)
    smoke = _plan(tmp_path, seeds=seeds, training={**SMOKE, "max_tokens": 4})
    record_campaign(smoke, "c-20250201T120000Z-0a1b", closing_s=0.0)
    found = _explain(_plan(tmp_path), learn(tmp_path)).wall_time
    assert found is not None
    assert {c.match for c in found.conditions} == {"same"}


def test_after_a_resume_only_what_the_new_attempt_warmed_up_is_left_out(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "run")
    record_run(files, _plan(tmp_path).runs[0], [2.0] * 4)
    row = json.loads(files.metrics.read_text().splitlines()[-1])
    for step, seconds in ((5, 30.0), (6, 3.0), (7, 3.0)):
        again = {**row, "step": step, "attempt": 2, "step_time_s": seconds}
        files.metrics.write_text(files.metrics.read_text() + json.dumps(again) + "\n")
    begin = {"event": "begin", "attempt": 2, "started_at": row["timestamp"], "resumed_from_step": 4}
    files.attempts.write_text(files.attempts.read_text() + json.dumps(begin) + "\n")
    found = measure_run(files.directory)
    assert found is not None
    assert found.step_times_s == (3.0, 3.0)


def test_more_workers_than_cores_are_no_advice_to_a_backend_that_computes_on_them(tmp_path: Path) -> None:
    plan = _plan(tmp_path, seeds=[0, 1, 2], parallel=True, max_workers=2)
    record_campaign(plan, "c-20250131T120000Z-0a1b", closing_s=0.0)
    answers, history = preflight(plan, "c.toml"), learn(tmp_path)
    offers = [explain_plan(plan, answers, history, cores, "c.toml").wall_time for cores in (2.0, 4.0)]
    assert [[c.setting for c in time.changes] for time in offers if time] == [
        [],
        ["campaign.max_workers = 3"],
    ]


def test_places_for_a_campaign_in_turn_need_parallel_as_well(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    record_campaign(plan, "c-20250131T120000Z-0a1b", closing_s=0.0)
    line = _line(_explain(plan, learn(tmp_path), budget_s=100.0), "wall time acceptable")
    assert "--set campaign.parallel=true --set campaign.max_workers=2 --budget 100s" in line.command


def test_failures_of_the_surroundings_are_learnt_per_hour_of_steps(tmp_path: Path) -> None:
    record_campaign(_plan(tmp_path), "c-20250131T120000Z-0a1b", ending="infrastructure")
    assert learn(tmp_path).failures_per_hour == pytest.approx(4 / (4 * 40 / 3600))


def test_how_well_earlier_campaigns_were_estimated_is_shown(tmp_path: Path) -> None:
    expected = Expectation(100.0, 120.0, 0.0, "a pilot", actual_s=110.0)
    record_campaign(_plan(tmp_path), "c-20250131T120000Z-0a1b", expected, closing_s=0.0)
    found = _explain(_plan(tmp_path), learn(tmp_path)).wall_time
    assert found is not None
    assert found.actual_over_p50 == (1.1,)


def test_without_data_the_checklist_says_which_command_would_settle_it(tmp_path: Path) -> None:
    found = _explain(_plan(tmp_path, training={"batch_size": 8, "group_size": 16}), None)
    lines = {line.question: line for line in found.checklist}
    assert [line.state for line in lines.values()] == ["unknown", "warn", "pass", "unknown", "unknown"]
    assert "--set training.batch_size=2" in lines["smoke test or full run"].command
    assert lines["pilot confirms throughput"].command == found.pilot_command


@pytest.mark.parametrize(("budget_s", "state"), [(3600.0, "pass"), (100.0, "warn"), (None, "unknown")])
def test_a_budget_is_held_against_p90(tmp_path: Path, budget_s: float | None, state: str) -> None:
    record_campaign(_plan(tmp_path), "c-20250131T120000Z-0a1b", closing_s=0.0)
    found = _explain(_plan(tmp_path), learn(tmp_path), budget_s=budget_s)
    assert _line(found, "wall time acceptable").state == state


@pytest.mark.parametrize(
    ("launcher", "warned"), [("inline", ["run_timeout", "stall_timeout"]), ("local", [])]
)
def test_timeouts_that_nobody_would_look_after_are_warned_of(launcher: str, warned: list[str]) -> None:
    table = {"seeds": [0], "launcher": launcher, "run_timeout": 60.0, "stall_timeout": 5.0}
    plan = plan_runs(parse({"campaign": table}, "c.toml", try_plugins=False), "c.toml")
    lines = [line for line in warnings_of(plan, {}, 2.0) if "inline" in line]
    assert [line.split()[0] for line in lines] == warned


def test_commands_estimate_from_where_the_estimate_was_made_from(tmp_path: Path) -> None:
    record_campaign(_plan(tmp_path), "c-20250131T120000Z-0a1b", closing_s=0.0)
    found = _explain(_plan(tmp_path), learn(tmp_path), learned_from="logs/calibrations/c/pilot")
    assert "--from logs/calibrations/c/pilot --budget" in _line(found, "wall time acceptable").command


@pytest.mark.parametrize(("level", "is_said"), [("minimal", False), ("paused", True)])
def test_a_throttle_that_never_trains_is_said_before_it_waits(level: str, is_said: bool) -> None:
    raw = {"throttle": {"enabled": True, "min_level": level}, "campaign": {"seeds": [0]}}
    plan = plan_runs(parse(raw, "c.toml"), "c.toml")
    assert any("never trains" in line for line in warnings_of(plan, {}, 2.0)) == is_said


@pytest.mark.parametrize(("backend", "is_generous"), [("numpy", True), ("local", False), ("tinker", False)])
def test_only_where_a_completion_is_the_answer_does_its_length_bound_max_tokens(backend, is_generous) -> None:
    raw = {"backend": {"backend": backend}, "training": {"max_tokens": 1024}, "campaign": {"seeds": [0]}}
    plan = plan_runs(parse(raw, "c.toml", try_plugins=False), "c.toml")
    answers = dict.fromkeys(plan.first_runs(), 3)
    assert any("longest answer" in line for line in warnings_of(plan, answers, 2.0)) == is_generous
    line = _line(explain_plan(plan, answers, None, 2.0, "c.toml"), "max_tokens set on purpose")
    assert line.state == ("warn" if is_generous else "pass")


def test_a_default_of_max_tokens_is_no_choice(tmp_path: Path) -> None:
    found = _explain(_plan(tmp_path), None, sets_max_tokens=False)
    assert _line(found, "max_tokens set on purpose").state == "warn"


def test_completions_that_are_often_cut_off_are_warned_of(tmp_path: Path) -> None:
    record_campaign(_plan(tmp_path), "c-20250131T120000Z-0a1b", closing_s=0.0, max_token_hit_rate=0.25)
    line = _line(_explain(_plan(tmp_path), learn(tmp_path)), "max_tokens set on purpose")
    assert (line.state, line.answer) == ("warn", "it cuts off 25% of the completions of a")


def test_a_full_run_wants_every_condition_to_have_finished_before(tmp_path: Path) -> None:
    full = {"batch_size": 8, "group_size": 8, "max_tokens": 16}
    one = _plan(tmp_path, conditions=[{"name": "a"}])
    record_campaign(one, "c-20250131T120000Z-0a1b", closing_s=0.0)
    line = _line(_explain(_plan(tmp_path, training=full), learn(tmp_path)), "smoke test or full run")
    assert (line.state, line.answer) == ("warn", "full run, and b never finished a run")


def test_more_workers_than_cores_are_beyond_the_limits(tmp_path: Path) -> None:
    line = _line(_explain(_plan(tmp_path, parallel=True), None), "parallelism within limits")
    assert (line.state, line.answer) == ("warn", "4 workers share 2 CPU cores")


def test_long_waits_for_permits_are_beyond_the_limits(tmp_path: Path) -> None:
    fields = {"sample_time_s": 1.0, "permit_held_s": 1.0}
    remote = _plan(tmp_path, parallel=True, max_workers=2)
    record_campaign(remote, "c-20250131T120000Z-0a1b", closing_s=0.0, **fields)
    raw_permits = {"backend": {"max_concurrent": 1}}
    plan = plan_runs(
        parse(
            {
                "training": SMOKE,
                "logging": {"log_dir": str(tmp_path)},
                **raw_permits,
                "campaign": {
                    "seeds": [0, 1],
                    "max_steps": 40,
                    "parallel": True,
                    "max_workers": 2,
                    "conditions": [{"name": "a"}],
                },
            },
            "c",
        ),
        "c.toml",
    )
    found = _explain(plan, learn(tmp_path))
    line = _line(found, "parallelism within limits")
    assert line.state == "warn"
    assert line.command == f"retrain explain c.toml --from {tmp_path} --set backend.max_concurrent=2"
    assert found.wall_time is not None
    assert found.wall_time.limited_by == "permits"


@pytest.mark.parametrize(
    ("text", "overrides", "is_set"),
    [
        ("[training]\nmax_tokens = 8", [], True),
        ("[[campaign.conditions]]\ntraining = {max_tokens = 8}", [], True),
        ("", ["training.max_tokens=8"], True),
        ("[training]\nmax_steps = 8", ["training.max_steps=9"], False),
    ],
)
def test_a_key_is_set_by_the_file_a_condition_or_an_override(
    tmp_path: Path, text: str, overrides: list[str], is_set: bool
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    assert sets_key(path, overrides, "training", "max_tokens") is is_set
