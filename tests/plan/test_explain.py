"""What `explain` estimates from earlier runs, and what it says when there are none."""

from __future__ import annotations

import math
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import tomli_w

from retrain.cli.explain import _time
from retrain.config.load import load_config, parse
from retrain.plan.build import plan_runs
from retrain.plan.estimate.history import learn
from retrain.plan.estimate.wall_time import learned_for
from retrain.plan.estimate.workload import CROWDED_DRIFT, NORMAL_P90
from retrain.plan.explain import Explanation, explain_plan
from retrain.plan.matrix import Plan
from retrain.plan.preflight import preflight
from retrain.records.layout import create_directory
from retrain.records.manifest import Expectation
from tests.explained import SMOKE, explained, line_of, plan_of
from tests.recorded import record_campaign


def test_without_a_pilot_it_says_what_is_unknown_and_how_to_get_it(tmp_path: Path) -> None:
    found = explained(plan_of(tmp_path), None)
    assert found.wall_time is None
    assert "step times" in found.unknown
    assert found.pilot_command == (
        f"retrain c.toml --set campaign.max_steps=20 && retrain explain c.toml --from {tmp_path}"
    )


@pytest.mark.parametrize(
    ("decision", "options"),
    [
        ({"over": [1, 20]}, ""),
        ({"rungs": [10, 40]}, " --set 'decision.rungs=[]'"),
        (
            {"over": [0, 500], "per": "tokens", "finish": True},
            " --set decision.over=last --set decision.per=steps --set decision.finish=false",
        ),
    ],
)
def test_a_pilot_compares_what_its_runs_come_to(
    decision: dict[str, object], options: str, tmp_path: Path
) -> None:
    file = tmp_path / "c.toml"
    campaign = {"seeds": [0, 1], "max_steps": 40, "conditions": [{"name": "a"}, {"name": "b"}]}
    file.write_text(tomli_w.dumps({"campaign": campaign, "decision": {"metric": "mean_reward", **decision}}))
    pilot = explained(plan_runs(load_config(file), "c.toml"), None).pilot_command.split(" && ")[0]
    assert pilot == f"retrain c.toml --set campaign.max_steps=20{options}"
    assert plan_runs(load_config(file, shlex.split(pilot)[3::2]), "c.toml").runs[0].max_steps == 20


def test_a_pilot_is_no_longer_than_the_campaign(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, steps=5)
    assert "campaign.max_steps=5 " in explained(plan, None).pilot_command
    record_campaign(plan, "c-20250131T120000Z-0a1b", step_times_s={"a": [1.0] * 5, "b": [2.0] * 5})
    throughput = line_of(explained(plan, learn(tmp_path)), "pilot confirms throughput")
    assert "fewer than" not in throughput.answer


@pytest.mark.parametrize("name", ["c", "/", "Größe [1/2]", "long" * 20])
def test_it_points_to_earlier_campaigns_that_were_not_read(tmp_path: Path, name: str) -> None:
    plan = plan_of(tmp_path, name=name)
    record_campaign(plan, "other-20250131T120000Z-0a1b")
    assert not explained(plan, None).warnings
    record_campaign(plan, create_directory(tmp_path, name).name)
    assert explained(plan, None).warnings == (
        f"{tmp_path}/ has earlier campaigns of {plan.name}; to estimate from them: "
        f"retrain explain c.toml --from {tmp_path}",
    )
    assert not explained(plan, learn(tmp_path)).warnings


def test_a_batch_of_far_more_prompts_than_there_are_is_told(
    retrain: Callable[..., CompletedProcess[str]], campaign_file: Path
) -> None:
    said = retrain("explain", campaign_file, "--set", "training.batch_size=9000").stdout
    assert "note: [training].batch_size: got 9000, so a step asks each of the 90 training prompts 100" in said
    said = retrain("explain", campaign_file, "--set", "training.batch_size=900").stdout
    assert "so a step asks" not in said


def test_without_earlier_runs_it_does_not_say_that_there_are_none(
    retrain: Callable[..., CompletedProcess[str]], campaign_file: Path
) -> None:
    said = retrain("explain", campaign_file).stdout
    assert "wall time               unknown; it depends on step times, start-up time," in said


def test_a_log_directory_that_cannot_be_is_no_earlier_campaign(tmp_path: Path) -> None:
    assert not explained(plan_of(tmp_path / ("long" * 99)), None).warnings


def test_an_estimate_adds_start_and_end_to_the_steps_of_each_condition(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    times = {"a": [1.0] * 21, "b": [2.0] * 21}
    record_campaign(plan, "c-20250131T120000Z-0a1b", step_times_s=times, startup_s=10.0, closing_s=0.0)
    found = explained(plan, learn(tmp_path)).wall_time
    assert found is not None
    assert found.p50_s == pytest.approx(2 * (40 * 1 + 40 * 2) + 4 * 10.0)
    assert found.rule_of_thumb_s == 160 * 1.5
    assert (found.measured_runs, found.limited_by) == (4, "workers")


def test_two_earlier_runs_that_agree_do_not_prove_that_all_do(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    times = {"a": [1.0] * 21, "b": [1.0] * 21}
    record_campaign(plan, "c-20250131T120000Z-0a1b", step_times_s=times, startup_s=0.0, closing_s=0.0)
    found = explained(plan, learn(tmp_path)).wall_time
    assert found is not None
    assert found.p50_s == pytest.approx(160)
    assert found.p90_s > 160 * math.exp(NORMAL_P90 * math.hypot(CROWDED_DRIFT, 0.02))


def test_the_rule_of_thumb_takes_the_median_of_the_steps_that_it_names(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    times = {"a": [1.0] * 31, "b": [2.0] * 11}
    record_campaign(plan, "c-20250131T120000Z-0a1b", step_times_s=times, startup_s=10.0, closing_s=0.0)
    other = plan_of(tmp_path, training={**SMOKE, "max_tokens": 4})  # unused
    record_campaign(other, "c-20250130T120000Z-0a1b", startup_s=10.0, closing_s=0.0)
    found = explained(plan, learn(tmp_path)).wall_time
    assert found is not None
    assert (found.measured_runs, found.measured_steps, found.median_step_time_s) == (4, 80, 1.0)
    assert found.rule_of_thumb_s == 160 * 1.0  # half of them take 2 s
    assert found.lower_bound_s == pytest.approx(2 * (40 * 1 + 40 * 2) + 4 * 10.0)


def test_evaluations_and_checkpoints_of_the_plan_are_counted_as_often_as_they_come(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, training={**SMOKE, "save_every": 10})
    record_campaign(plan, "c-20250131T120000Z-0a1b", step_times_s={}, closing_s=5.0)
    learned = learned_for(plan, learn(tmp_path), cores=2.0)
    assert learned is not None
    assert learned.conditions["a"].cost.seconds == pytest.approx(1.0 + 3 * 5.0 / 40)  # the fourth is the end


def test_a_condition_that_was_never_measured_borrows_and_says_so(tmp_path: Path) -> None:
    one = plan_of(tmp_path, conditions=[{"name": "a"}])
    record_campaign(one, "c-20250131T120000Z-0a1b", closing_s=0.0)
    found = explained(plan_of(tmp_path), learn(tmp_path)).wall_time
    assert found is not None
    assert [c.match for c in found.conditions] == ["same", "other condition"]
    assert any("b was never measured itself" in note for note in found.notes)


def test_other_settings_are_named(tmp_path: Path) -> None:
    record_campaign(plan_of(tmp_path), "c-20250131T120000Z-0a1b", closing_s=0.0)
    found = explained(plan_of(tmp_path, training={**SMOKE, "batch_size": 4}), learn(tmp_path))
    assert found.wall_time is not None
    assert found.wall_time.conditions[0].differs == ("training.batch_size = 2, not 4",)
    assert line_of(found, "pilot confirms throughput").state == "warn"


def test_steps_of_single_turns_do_not_stand_for_those_of_episodes(tmp_path: Path) -> None:
    def guessing(**game: object) -> Plan:
        conditions = [{"name": name, "data": {"task": "guess"}, **game} for name in "ab"]
        return plan_of(tmp_path, conditions=conditions)

    record_campaign(guessing(), "c-20250131T120000Z-0a1b", closing_s=0.0)
    found = explained(guessing(environment={"environment": "guess", "max_turns": 4}), learn(tmp_path))
    assert found.wall_time is not None
    assert found.wall_time.conditions[0].differs == (
        'environment.environment = "single_turn", not "guess"',
        "environment.max_turns = 16, not 4",
    )


def test_episodes_that_a_limit_ends_are_no_sign_of_too_few_tokens(tmp_path: Path) -> None:
    table = {"data": {"task": "guess"}, "environment": {"environment": "guess", "max_turns": 4}}
    plan = plan_of(tmp_path, conditions=[{"name": name, **table} for name in "ab"])
    record_campaign(plan, "c-20250131T120000Z-0a1b", closing_s=0.0, max_token_hit_rate=0.4)
    line = line_of(explained(plan, learn(tmp_path)), "max_tokens set on purpose")
    assert (line.state, line.answer) == ("pass", "16; 40% of a's episodes are ended by a limit")


def test_a_key_that_an_earlier_version_did_not_have_is_no_other_setting(tmp_path: Path) -> None:
    record_campaign(plan_of(tmp_path), "c-20250131T120000Z-0a1b", closing_s=0.0)
    for path in tmp_path.glob("*/runs/*/run.toml"):
        tables = tomllib.loads(path.read_text())
        del tables["reward"]["params"], tables["backpressure"]["max_batch_size"]
        path.write_text(tomli_w.dumps(tables))
    found = explained(plan_of(tmp_path), learn(tmp_path)).wall_time
    assert found is not None
    assert [c.match for c in found.conditions] == ["same", "same"]


def test_one_earlier_run_gives_a_wide_p90_and_says_why(tmp_path: Path) -> None:
    plan, widths, reasons = plan_of(tmp_path, seeds=[0, 1, 2]), [], []
    for seeds in ([0], [0, 1]):
        record_campaign(plan_of(tmp_path, seeds=seeds), f"c-2025013{len(seeds)}T120000Z-0a1b", closing_s=0.0)
        found = explained(plan, learn(tmp_path)).wall_time
        assert found is not None
        widths.append(found.p90_s / found.p50_s)
        reasons.append([note for note in found.notes if "P90 is wide" in note])
    assert widths[0] - 1 > 1.2 * (widths[1] - 1) > 0
    assert [len(notes) for notes in reasons] == [1, 0]


def test_runs_of_the_same_settings_are_preferred_to_newer_ones(tmp_path: Path) -> None:
    record_campaign(plan_of(tmp_path), "c-20250131T120000Z-0a1b", closing_s=0.0)
    other = plan_of(tmp_path, training={**SMOKE, "max_tokens": 4})
    times = {"a": [9.0] * 21, "b": [9.0] * 21}
    record_campaign(other, "c-20250201T120000Z-0a1b", step_times_s=times, closing_s=0.0)
    found = explained(plan_of(tmp_path), learn(tmp_path)).wall_time
    assert found is not None
    assert found.median_step_time_s == 1.0


def test_start_up_and_end_are_those_of_runs_with_the_same_settings(tmp_path: Path) -> None:
    record_campaign(plan_of(tmp_path), "c-20250131T120000Z-0a1b", startup_s=60.0, closing_s=5.0)
    other = plan_of(tmp_path, training={**SMOKE, "max_tokens": 4})
    for day in ("0201", "0202"):
        record_campaign(other, f"c-2025{day}T120000Z-0a1b", startup_s=1.0, closing_s=0.0)
    found = explained(plan_of(tmp_path), learn(tmp_path)).wall_time
    assert found is not None
    assert (found.startup_s, found.closing_s) == (60.0, 5.0)


def test_more_workers_than_cores_are_no_advice_to_a_backend_that_computes_on_them(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, seeds=[0, 1, 2], parallel=True, max_workers=2)
    record_campaign(plan, "c-20250131T120000Z-0a1b", closing_s=0.0)
    answers, history = preflight(plan, "c.toml"), learn(tmp_path)
    offers = [explain_plan(plan, answers, history, cores, "c.toml").wall_time for cores in (2.0, 4.0)]
    assert [[c.setting for c in time.changes] for time in offers if time] == [
        [],
        ["campaign.max_workers = 3"],
    ]


def test_how_well_earlier_campaigns_were_estimated_is_shown(tmp_path: Path) -> None:
    expected = Expectation(100.0, 120.0, 0.0, "a pilot", actual_s=110.0)
    record_campaign(plan_of(tmp_path), "c-20250131T120000Z-0a1b", expected, closing_s=0.0)
    found = explained(plan_of(tmp_path), learn(tmp_path)).wall_time
    assert found is not None
    assert found.actual_over_p50 == (1.1,)


def test_runs_that_a_decision_may_spare_are_at_most_so_many(
    retrain: Callable[..., CompletedProcess[str]], campaign_file: Path
) -> None:
    assert "tiny: 4 runs" in retrain("explain", campaign_file).stdout
    campaign_file.write_text(
        campaign_file.read_text() + '[decision]\nmetric = "mean_reward"\nmax_seeds = 6\n'
    )
    said = retrain("explain", campaign_file).stdout
    assert "tiny: at most 12 runs" in said
    assert "total campaign steps    at most 48" in said


def adapting(logs: Path, **row: object) -> Explanation:
    """Explain 8 runs that are always in a call of 1 s, from earlier ones with 4 permits at first."""
    raw = {
        "training": SMOKE,
        "logging": {"log_dir": str(logs)},
        "backend": {"max_concurrent": "auto", "options": {"api_latency_s": 1.0}},
        "campaign": {"seeds": list(range(8)), "max_steps": 40, "parallel": True},
    }
    plan = plan_runs(parse(raw, "c.toml"), "c.toml")
    held = {"sample_time_s": 1.0, "permit_held_s": 1.0, "permits": 4}
    record_campaign(plan, "c-20250131T120000Z-0a1b", closing_s=0.0, **held, **row)
    return explained(plan, learn(logs))


def test_permits_that_adapt_to_a_limit_not_known_make_the_forecast_a_range(tmp_path: Path) -> None:
    """4 permits take twice as long as enough."""
    found = adapting(tmp_path)
    assert found.wall_time is not None
    assert found.wall_time.p50_s == pytest.approx(40.0)
    assert found.wall_time.slowest_p50_s == pytest.approx(80.0, rel=0.02)
    assert found.wall_time.p90_s >= found.wall_time.slowest_p50_s
    assert any(
        "P50 goes from unlimited permits to the 4 that it starts with" in note
        for note in found.wall_time.notes
    )
    assert line_of(found, "parallelism within limits").state == "unknown"


def test_what_limits_a_campaign_is_told_for_unlimited_permits_where_these_are_assumed(tmp_path: Path) -> None:
    found = adapting(tmp_path)
    assert found.wall_time is not None
    lines = dict(_time(found.wall_time, ""))
    assert lines["limited by"].endswith(" with unlimited permits")


def test_permits_that_no_earlier_run_could_adapt_stay_as_they_are(tmp_path: Path) -> None:
    """The backend's file says that it reports its calls, and its runs have shown that it does not."""
    found = adapting(tmp_path, permits_fixed="the backend reports no call")
    assert not found.permits_adapt
    assert found.wall_time is not None
    assert found.wall_time.p50_s == pytest.approx(80.0, rel=0.02)
    assert found.wall_time.slowest_p50_s is None
    assert any("permits stay at 4" in note for note in found.wall_time.notes)
    assert "backend.max_concurrent = 8" in [change.setting for change in found.wall_time.changes]
    assert line_of(found, "parallelism within limits").state == "warn"


def test_what_is_said_of_many_conditions_is_said_once(
    retrain: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    one = plan_of(tmp_path, conditions=[{"name": "a"}])
    record_campaign(one, "c-20250131T120000Z-0a1b", closing_s=0.0)
    names = [f"point-{n}" for n in range(60)]
    found = explained(plan_of(tmp_path, conditions=[{"name": name} for name in names]), learn(tmp_path))
    assert found.wall_time is not None
    (note,) = [note for note in found.wall_time.notes if "never measured" in note]
    assert note == "point-0, point-1, point-2 and 57 more were never measured; the step times of a are used"
    file = tmp_path / "many.toml"
    table = {"seeds": [0], "max_steps": 2, "conditions": [{"name": name} for name in names]}
    file.write_text(tomli_w.dumps({"training": SMOKE, "campaign": table}))
    said = retrain("explain", file).stdout
    assert "  ... and 30 more conditions; --json lists all" in said
    assert "point-29" in said
    assert "point-30" not in said


def test_a_forecast_of_refilled_batches_takes_tie_rates_from_earlier_rows(tmp_path: Path) -> None:
    """A pilot without a refill, of which half of the groups tied: each batch takes two."""
    parts = {"sample_time_s": 0.5, "reward_time_s": 0.1, "train_time_s": 0.4, "batch_size": 2}
    plan = plan_of(tmp_path)
    record_campaign(
        plan,
        "c-20250131T120000Z-0a1b",
        step_times_s={"a": [1.0] * 11, "b": [1.0] * 11},
        zero_signal_group_fraction=0.5,
        startup_s=0.0,
        closing_s=0.0,
        **parts,
    )
    refilled = plan_of(tmp_path, data={"refill": "tied"})
    found = explained(refilled, learn(tmp_path)).wall_time
    assert found is not None
    assert found.p50_s == pytest.approx(160 * 1.6, rel=0.01)
    assert any("at most 10 steps of a run measured" in note for note in found.notes)
    assert not any("refilled" in note for note in explained(plan, learn(tmp_path)).wall_time.notes)
