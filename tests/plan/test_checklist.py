"""The checklist and the warnings of `explain`: what each answers, and the command that would settle it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from retrain.campaign.launcher_setup import as_launched
from retrain.config.load import fixed_keys, load_config, parse, sets_key
from retrain.plan.build import plan_runs
from retrain.plan.estimate.history import learn
from retrain.plan.estimate.workload import Crowding
from retrain.plan.explain import SUGGESTED, explain_plan
from retrain.plan.notes import warnings_of
from retrain.plan.preflight import Checked
from tests.explained import SMOKE, explained, line_of, plan_of
from tests.recorded import record_campaign


def test_without_data_the_checklist_says_which_command_would_settle_it(tmp_path: Path) -> None:
    found = explained(plan_of(tmp_path, training={"batch_size": 8, "group_size": 16}), None)
    lines = {line.question: line for line in found.checklist}
    assert [line.state for line in lines.values()] == ["unknown", "warn", "pass", "unknown", "unknown"]
    assert "--set training.batch_size=2" in lines["smoke test or full run"].command
    assert lines["pilot confirms throughput"].command == found.pilot_command


@pytest.mark.parametrize(("budget_s", "state"), [(3600.0, "pass"), (100.0, "warn"), (None, "unknown")])
def test_a_budget_is_held_against_p90(tmp_path: Path, budget_s: float | None, state: str) -> None:
    record_campaign(plan_of(tmp_path), "c-20250131T120000Z-0a1b", closing_s=0.0)
    found = explained(plan_of(tmp_path), learn(tmp_path), budget_s=budget_s)
    assert line_of(found, "wall time acceptable").state == state


def test_a_budget_that_no_change_keeps_is_told_without_the_same_command_again(tmp_path: Path) -> None:
    one = plan_of(tmp_path, seeds=[0], conditions=[{"name": "a"}])
    record_campaign(one, "c-20250131T120000Z-0a1b", closing_s=0.0)
    line = line_of(explained(one, learn(tmp_path), budget_s=1.0), "wall time acceptable")
    assert (line.state, line.command) == ("warn", "")


@pytest.mark.parametrize(
    ("launcher", "warned"), [("inline", ["run_timeout", "stall_timeout"]), ("local", [])]
)
def test_timeouts_that_nobody_would_look_after_are_warned_of(launcher: str, warned: list[str]) -> None:
    table = {"seeds": [0], "launcher": launcher, "run_timeout": 60.0, "stall_timeout": 5.0}
    plan = plan_runs(parse({"campaign": table}, "c.toml", try_plugins=False), "c.toml")
    lines = [line for line in warnings_of(plan, {}) if "inline" in line]
    assert [line.split()[0] for line in lines] == warned


@pytest.mark.parametrize(("level", "is_said"), [("minimal", False), ("paused", True)])
def test_a_throttle_that_never_trains_is_said_before_it_waits(level: str, is_said: bool) -> None:
    raw = {"throttle": {"enabled": True, "min_level": level}, "campaign": {"seeds": [0]}}
    plan = plan_runs(parse(raw, "c.toml"), "c.toml")
    assert any("never trains" in line for line in warnings_of(plan, {})) == is_said


@pytest.mark.parametrize(
    ("training", "pressure", "is_said"),
    [
        ({"lr_schedule": "linear"}, {"objective": "goodput"}, True),
        ({"lr_schedule": "linear"}, {"objective": "goodput", "control": "microbatch"}, False),
        ({"lr_schedule": "linear", "batch_size": 64}, {"objective": "goodput"}, False),
        ({"lr_schedule": "linear"}, {}, False),
        ({}, {"objective": "goodput"}, False),
    ],
)
def test_a_schedule_that_ends_before_the_run_is_warned_of(
    training: dict, pressure: dict, is_said: bool
) -> None:
    raw = {"training": training, "backpressure": {"enabled": True, **pressure}}
    lines = list(warnings_of(plan_runs(parse(raw, "c.toml"), "c.toml"), {}))
    assert any("lr_schedule" in line for line in lines) == is_said


@pytest.mark.parametrize(
    ("backend", "environment", "is_generous"),
    [
        ("numpy", "single_turn", True),
        ("numpy", "guess", False),
        ("local", "single_turn", False),
        ("tinker", "single_turn", False),
    ],
)
def test_only_where_a_completion_is_the_answer_does_its_length_bound_max_tokens(
    backend, environment, is_generous
) -> None:
    raw = {
        "backend": {"backend": backend},
        "environment": {"environment": environment},
        "training": {"max_tokens": 1024},
        "campaign": {"seeds": [0]},
    }
    plan = plan_runs(parse(raw, "c.toml", try_plugins=False), "c.toml")
    answers = dict.fromkeys(plan.first_runs, 3)
    assert any("longest answer" in line for line in warnings_of(plan, answers)) == is_generous
    line = line_of(explain_plan(plan, Checked(answers, {}), None, 2.0, "c.toml"), "max_tokens set on purpose")
    assert line.state == ("warn" if is_generous else "pass")


def test_a_default_of_max_tokens_is_no_choice(tmp_path: Path) -> None:
    found = explained(plan_of(tmp_path), None, sets_max_tokens=False)
    assert line_of(found, "max_tokens set on purpose").state == "warn"


@pytest.mark.parametrize(
    ("max_tokens", "state", "answer"),
    [
        (3, "warn", "25% of a's completions are cut off"),
        (16, "pass", "16; every correct answer fits; 25% of a's completions hit the limit without ending"),
    ],
)
def test_completions_that_are_often_cut_off_are_warned_of_unless_every_answer_fits(
    tmp_path: Path, max_tokens: int, state: str, answer: str
) -> None:
    plan = plan_of(tmp_path, training={**SMOKE, "max_tokens": max_tokens})
    record_campaign(plan, "c-20250131T120000Z-0a1b", closing_s=0.0, max_token_hit_rate=0.25)
    line = line_of(explained(plan, learn(tmp_path)), "max_tokens set on purpose")
    assert (line.state, line.answer) == (state, answer)


def test_a_full_run_wants_every_condition_to_have_finished_before(tmp_path: Path) -> None:
    full = {"batch_size": 8, "group_size": 8, "max_tokens": 16}
    one = plan_of(tmp_path, conditions=[{"name": "a"}])
    record_campaign(one, "c-20250131T120000Z-0a1b", closing_s=0.0)
    line = line_of(explained(plan_of(tmp_path, training=full), learn(tmp_path)), "smoke test or full run")
    assert (line.state, line.answer) == ("warn", "full run, but b never finished a run")


def test_more_workers_than_cores_are_beyond_the_limits(tmp_path: Path) -> None:
    line = line_of(explained(plan_of(tmp_path, parallel=True), None), "parallelism within limits")
    assert line.state == "warn"
    assert line.answer.startswith("4 workers share 2 CPU cores: steps will be slower than measured alone;")


@pytest.mark.parametrize(
    ("slowdown", "state", "answer"),
    [
        (1.5, "pass", "a step takes 1.5 times as long as alone, as a calibration measured"),
        (2.5, "warn", "steps will be slower than measured alone; with fewer workers, each has its own core"),
    ],
)
def test_what_a_calibration_measured_of_workers_that_share_cores_is_no_guess(
    tmp_path: Path, slowdown: float, state: str, answer: str
) -> None:
    plan = plan_of(tmp_path, parallel=True)
    record_campaign(plan, "c-20250131T120000Z-0a1b", closing_s=0.0)
    measured = Crowding(((1.0, 1.0), (4.0, slowdown)), is_full=True)
    found = explained(plan, replace(learn(tmp_path), crowding=measured))
    line = line_of(found, "parallelism within limits")
    assert (line.state, line.answer) == (state, f"4 workers share 2 CPU cores: {answer}")


def test_long_waits_for_permits_are_beyond_the_limits(tmp_path: Path) -> None:
    fields = {"sample_time_s": 1.0, "permit_held_s": 1.0}
    remote = plan_of(tmp_path, parallel=True, max_workers=2)
    record_campaign(remote, "c-20250131T120000Z-0a1b", closing_s=0.0, **fields)
    raw_permits = {"backend": {"max_concurrent": 1, "options": {"api_latency_s": 1.0}}}
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
    found = explained(plan, learn(tmp_path))
    line = line_of(found, "parallelism within limits")
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


def test_commands_estimate_from_where_the_estimate_was_made_from(tmp_path: Path) -> None:
    record_campaign(plan_of(tmp_path), "c-20250131T120000Z-0a1b", closing_s=0.0)
    found = explained(plan_of(tmp_path), learn(tmp_path), learned_from="logs/calibrations/c/pilot")
    assert "--from logs/calibrations/c/pilot --budget" in line_of(found, "wall time acceptable").command


def test_what_a_calibration_has_measured_and_changed_is_not_sent_back_to_it(tmp_path: Path) -> None:
    record_campaign(
        plan_of(tmp_path, training={**SMOKE, "max_tokens": 2}), "c-20250131T120000Z-0a1b", closing_s=0.0
    )
    pilot = "logs/calibrations/c-20250131T120000Z-0a1b/pilot"
    found = explained(plan_of(tmp_path), learn(tmp_path), learned_from=pilot, sets_max_tokens=False)

    states = {line.question: line.state for line in found.checklist}
    assert states["max_tokens set on purpose"] == states["pilot confirms throughput"] == "pass"
    throughput = line_of(found, "pilot confirms throughput").answer
    assert throughput.endswith("calibrated with training.max_tokens = 2, not 16")
    assert not any("calibrate c.toml" in line.command for line in found.checklist)


def test_another_group_size_than_the_calibrated_one_is_not_measured(tmp_path: Path) -> None:
    record_campaign(
        plan_of(tmp_path, training={**SMOKE, "group_size": 4}), "c-20250131T120000Z-0a1b", closing_s=0.0
    )
    found = explained(plan_of(tmp_path), learn(tmp_path), learned_from="logs/calibrations/c/pilot")
    assert line_of(found, "pilot confirms throughput").state == "warn"


def test_places_for_a_campaign_in_turn_need_parallel_as_well(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    record_campaign(plan, "c-20250131T120000Z-0a1b", closing_s=0.0)
    line = line_of(explained(plan, learn(tmp_path), budget_s=100.0), "wall time acceptable")
    assert "--set campaign.parallel=true --set campaign.max_workers=2 --budget 100s" in line.command


def test_a_campaign_inside_one_process_is_planned_one_run_at_a_time(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, parallel=True, max_workers=4, launcher="inline")
    assert as_launched(plan, "c.toml").workers == 1
    assert any("parallel has no effect" in line for line in warnings_of(plan, {}))


def test_a_limit_that_no_whole_answer_fits_is_warned_of(tmp_path: Path) -> None:
    training = {**SMOKE, "max_tokens": 2}  # "sort" has answers of three digits
    found = line_of(explained(plan_of(tmp_path, training=training), None), "max_tokens set on purpose")
    assert (found.state, found.answer) == ("warn", "2; the longest answer of a has 3 characters")
    assert found.command == "retrain explain c.toml --set training.max_tokens=4"


OWN_BATCHES = """
[training]
minibatches = 4
[campaign]
seeds = [0, 1]
[[campaign.conditions]]
name = "a"
training = { batch_size = 16, max_tokens = 4, max_steps = 40 }
[[campaign.conditions]]
name = "b"
training = { batch_size = 32, max_tokens = 8, max_steps = 60 }
"""
SWEPT = """
[training]
batch_size = 8
minibatches = 4
max_steps = 40
[backpressure]
enabled = true
min_batch_size = 5
[campaign]
seeds = [0, 1]
[campaign.sweep]
training.max_tokens = [4, 8]
"""
SEARCHED = """
[training]
batch_size = 4
max_tokens = 4
max_steps = 40
[campaign]
seeds = [0, 1]
[campaign.sweep]
training.lr = [1e-3, 2e-2]
[campaign.search]
rungs = [10, 20]
metric = "mean_reward"
"""


@pytest.mark.parametrize("text", [OWN_BATCHES, SWEPT, SEARCHED], ids=["own", "swept", "searched"])
def test_the_commands_that_it_suggests_are_accepted(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    plan = plan_runs(load_config(file), file.name)
    found = explained(plan, None, fixed=fixed_keys(file, (), SUGGESTED))
    suggested = {line.command.split(" && ")[0] for line in found.checklist if line.command}
    assert len(suggested) == 2  # a smoke test and a pilot
    for command in suggested:
        word, *arguments = command.split()
        assert word == "retrain"
        sets = [value for flag, value in pairwise(arguments) if flag == "--set"]
        assert plan_runs(load_config(file, sets), file.name).runs
    assert ("retrain calibrate c.toml" in suggested) == (text == OWN_BATCHES)
