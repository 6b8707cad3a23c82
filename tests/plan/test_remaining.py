"""What is left of a running campaign, and what was expected of it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from retrain.base.errors import RecordsError
from retrain.base.locks import hold
from retrain.campaign.forecast import Forecaster, union_s
from retrain.campaign.run import reopen, run_campaign
from retrain.config.load import parse
from retrain.plan.build import plan_runs
from retrain.plan.estimate.remaining import remaining, without_ends
from retrain.plan.estimate.workload import ALONE, Crowding, on_cores
from retrain.plan.matrix import Plan
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.manifest import Expectation, new_manifest, read_manifest, write_manifest
from retrain.records.metrics import MetricsEnds, read_ends
from retrain.records.run_row import Pace, RunEntry, RunRow, pace_of
from retrain.records.run_state import RunState, read_attempts
from tests.recorded import EPOCH, at, record_campaign, record_run


def _run(name: str, left: int, pace_s: float | None = None, running: bool = False) -> RunRow:
    pace = Pace(50, pace_s, (pace_s,) * 5, 3.0) if pace_s is not None else None
    return _row(name, left, pace, running)


def _row(name: str, left: int, pace: Pace | None, running: bool) -> RunRow:
    state = RunState.RUNNING if running else RunState.PENDING
    return RunRow(run_id=name, condition="a", seed=None, state=state, max_steps=left, pace=pace)


def test_runs_that_wait_take_places_as_they_become_free() -> None:
    runs = [_run("1", 10, 2.0, running=True), _run("2", 20, 2.0, running=True), _run("3", 30)]
    found = remaining(runs, workers=2)
    assert found is not None
    assert found.p50_s == 10 * 2.0 + 3.0 + 30 * 2.0  # the third takes the first one's place


def test_a_run_goes_on_at_its_own_pace() -> None:
    runs = [_run("slow", 10, 9.0, running=True), _run("fast", 10, 1.0, running=True)]
    found = remaining(runs, workers=2)
    assert found is not None
    assert found.p50_s == pytest.approx(90.0)


def test_what_followed_the_last_step_of_a_run_that_is_done_follows_others_too(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    files = RunFiles(tmp_path / "run")
    record_run(files, plan.runs[0], [2.0] * 11, closing_s=7.0)
    pace = pace_of(read_ends(files.metrics, 5), read_attempts(files.attempts))
    assert pace is not None
    assert pace.closing_s == 7.0
    done = replace(_row("1", 11, pace, running=False), state=RunState.DONE, step=11)
    runs = [done, _run("2", 10, 2.0, running=True), _run("3", 20, 2.0)]
    found = remaining(runs, workers=1)
    assert found is not None
    assert found.p50_s == pytest.approx(10 * 2.0 + 7.0 + 1.5 + 20 * 2.0 + 7.0, abs=2.0)
    assert without_ends(runs) == ""
    assert without_ends(runs[1:]) == ", without the evaluations at the end"


def test_steps_that_vary_give_a_p90() -> None:
    pace = Pace(100, 2.0, (1.0, 2.0, 3.0, 2.0, 2.0), None)
    found = remaining([_row("1", 100, pace, running=True)], workers=1)
    assert found is not None
    assert found.p50_s < found.p90_s < 1.3 * found.p50_s


def test_nothing_is_foretold_of_a_campaign_that_stands_still() -> None:
    assert remaining([_run("1", 10, 2.0)], workers=1) is None
    assert remaining([_run("1", 10, running=True)], workers=1) is None
    assert remaining([], workers=1) is None


def test_pace_counts_what_lies_between_steps(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    files = RunFiles(tmp_path / "run")
    record_run(files, plan.runs[0], [2.0] * 11, startup_s=4.0, between_s=1.0)
    pace = pace_of(read_ends(files.metrics, 5), read_attempts(files.attempts))
    until_s = EPOCH.timestamp() + 4 + 11 * 2 + 10 * 1
    assert pace == Pace(10, 3.0, (2.0,) * 5, 4.0, until_s - 30, until_s, 3.0, until_s - 12)
    assert pace.late_steps == 4


def test_a_pause_before_a_resume_is_no_pace() -> None:
    rows = [
        {"step": 1, "attempt": 1, "timestamp": at(0), "step_time_s": 2.0},
        {"step": 2, "attempt": 2, "timestamp": at(9000), "step_time_s": 2.0},
    ]
    pace = pace_of(MetricsEnds(rows[0], rows[1:]), ())
    assert pace is not None
    assert pace.step_s == 2.0


def test_what_an_api_paused_is_no_pace() -> None:
    rows = [
        {"step": n, "attempt": 1, "timestamp": at(2 * n + (60 if n > 3 else 0)), "step_time_s": 2.0}
        | {"api_pause_s": 60.0 if n == 4 else 0.0, "api_pauses_s": 60.0 if n > 3 else 0.0}
        for n in range(1, 7)
    ]
    rows[3]["step_time_s"] = 62.0
    pace = pace_of(MetricsEnds(rows[0], rows[1:], rows[2]), ())
    assert pace is not None
    assert (pace.step_s, pace.late_s, pace.recent_s) == (2.0, 2.0, (2.0,) * 5)


def test_a_clock_that_was_set_back_during_a_pause_gives_no_negative_pace() -> None:
    first = {"step": 1, "attempt": 1, "timestamp": "2026-01-01T12:00:00Z", "step_time_s": 2.0}
    last = {"step": 3, "attempt": 1, "timestamp": "2026-01-01T12:00:30Z", "step_time_s": 2.0}
    pace = pace_of(MetricsEnds(first, [last | {"api_pauses_s": 300.0}]), ())
    assert pace is not None
    assert (pace.steps, pace.step_s) == (1, 2.0)  # by what the steps themselves measured


@pytest.mark.parametrize("crowding", [ALONE, on_cores(1.0)], ids=["alone", "on one core"])
def test_a_resumed_run_goes_on_at_the_pace_since_then(crowding: Crowding) -> None:
    rows = [{"step": n, "attempt": 1, "timestamp": at(n), "step_time_s": 1.0} for n in range(1, 11)]
    rows += [
        {"step": n, "attempt": 2, "timestamp": at(9000 + 3 * n), "step_time_s": 3.0} for n in range(11, 60)
    ]
    rows[-1]["step_time_s"] = 30.0  # one that took long
    pace = pace_of(MetricsEnds(rows[0], rows[-5:], rows[30]), ())
    assert pace is not None
    assert pace.late_s == 3.0
    assert pace.late_steps == 28
    found = remaining([_row("1", 100, pace, running=True)], workers=1, crowding=crowding)
    assert found is not None
    assert found.p50_s == pytest.approx(300, rel=0.1)
    steady = replace(pace, recent_s=(3.0,) * 5)
    runs = [_row(name, 100, steady, running=True) for name in "123"]
    found = remaining(runs, workers=3, crowding=crowding)
    assert found is not None
    assert found.p50_s == pytest.approx(300, rel=0.1)  # they shared the core then as they do now


def test_a_step_that_took_no_time_on_shared_cores_has_a_pace() -> None:
    rows = [{"step": n, "attempt": n, "timestamp": at(10), "step_time_s": 0.0} for n in (1, 2)]
    pace = pace_of(MetricsEnds(rows[0], rows[1:]), ())
    others = Pace(50, 2.0, (2.0,) * 5, None, EPOCH.timestamp(), EPOCH.timestamp() + 10)
    runs = [_row("1", 10, pace, running=True), _row("2", 10, others, running=True)]
    assert remaining(runs, workers=2, crowding=on_cores(1.0)) is not None


@pytest.mark.parametrize("first", [{"mean_reward": 1}, {"step": "x", "attempt": 1, "timestamp": []}])
def test_a_damaged_first_row_leaves_the_pace_of_the_last_ones(first: dict) -> None:
    last = [{"step": 9, "attempt": 1, "timestamp": at(0), "step_time_s": s} for s in (2.0, -5.0, 4.0)]
    pace = pace_of(MetricsEnds(first, last), ())
    assert pace is not None
    assert (pace.step_s, pace.recent_s) == (3.0, (2.0, 4.0))


@pytest.mark.parametrize("damage", [{"p50_s": "x"}, {"p90_s": -1}, {"actual_s": "soon"}])
def test_an_expectation_that_is_no_time_makes_the_manifest_unreadable(tmp_path: Path, damage: dict) -> None:
    path = tmp_path / "manifest.json"
    manifest = replace(
        new_manifest("c", "", [], tmp_path), expected=Expectation(1.0, 2.0, 0.0, "a pilot", 1.0)
    )
    write_manifest(path, manifest)
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, "expected": {**found["expected"], **damage}}))
    with pytest.raises(RecordsError, match="is not a manifest"):
        read_manifest(path)


def test_time_in_which_no_run_lived_is_not_counted() -> None:
    assert union_s([(at(0), at(10)), (at(5), at(20)), (at(100), at(101)), (at(7), at(8))]) == 21.0


def _plan(logs: Path) -> Plan:
    training = {"batch_size": 2, "group_size": 2, "max_tokens": 4}
    raw = {
        "training": training,
        "logging": {"log_dir": str(logs)},
        "campaign": {"seeds": [0, 1], "max_steps": 40, "conditions": [{"name": "a"}]},
    }
    return plan_runs(parse(raw, "c.toml"), "c.toml")


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Plan, CampaignFiles, _Clock, Forecaster]:
    plan = _plan(tmp_path)
    files = CampaignFiles(tmp_path / "c-20250201T120000Z-0a1b")
    files.runs.mkdir(parents=True)
    files.campaign_toml.touch()
    planned = [RunEntry(r.run_id, r.condition, r.seed, r.max_steps, r.config_hash) for r in plan.runs]
    clock = _Clock()
    manifest = new_manifest("c", "", planned, tmp_path)
    write_manifest(files.manifest, manifest)
    return plan, files, clock, Forecaster(plan, files, manifest, clock)


def test_a_campaign_is_expected_to_take_what_earlier_ones_of_its_name_say(begun: tuple) -> None:
    plan, _, _, expecter = begun
    record_campaign(plan, "c-20250131T120000Z-0a1b", step_times_s={"a": [3.0] * 21}, closing_s=0.0)
    record_campaign(plan, "c-other-20250131T120000Z-0a1b", step_times_s={"a": [9.0] * 21}, closing_s=0.0)
    found = expecter.update()
    assert found is not None
    assert (found.p50_s, found.made_after_s) == (pytest.approx(2 * 40 * 3.0), 0.0)
    assert expecter.update() is None  # it was said


def test_without_earlier_ones_the_calibration_of_its_file_says(begun: tuple, tmp_path: Path) -> None:
    plan, _, _, expecter = begun
    calibration = tmp_path / "calibrations" / "c-20250131T115900Z-0a1b"
    calibration.mkdir(parents=True)
    pilot = replace(plan, log_dir=calibration)
    record_campaign(pilot, "pilot-20250131T120000Z-0a1b", step_times_s={"a": [3.0] * 21}, closing_s=0.0)
    found = expecter.update()
    assert found is not None
    assert (found.p50_s, found.made_from) == (pytest.approx(2 * 40 * 3.0), "2 earlier runs")


def test_without_earlier_ones_its_first_steps_tell(begun: tuple) -> None:
    plan, files, clock, expecter = begun
    run = files.run(plan.runs[0].run_id)
    assert expecter.update() is None
    record_run(run, plan.runs[0], [2.0] * 21)
    with hold(run.lock):
        clock.now_s = 42.0
        found = expecter.update()
    assert found is not None
    assert found == replace(found, p50_s=42.0 + (19 + 40) * 2.0, made_after_s=42.0)
    assert found.made_from == "its first steps, without the evaluations at the end"


def test_what_it_took_is_held_against_what_was_expected(begun: tuple) -> None:
    plan, _, clock, expecter = begun
    record_campaign(plan, "c-20250131T120000Z-0a1b", closing_s=0.0)
    expecter.update()
    clock.now_s = 100.0
    ended = expecter.ended()
    assert ended is not None
    assert ended.actual_s == 100.0


def test_a_resumed_campaign_keeps_what_was_expected_and_counts_no_pause(begun: tuple) -> None:
    plan, files, clock, _ = begun
    for run, began_s in zip(plan.runs, (0.0, 9000.0), strict=True):
        record_run(files.run(run.run_id), run, [1.0] * 40, began_s=began_s, closing_s=0.0)
    manifest = read_manifest(files.manifest)
    assert manifest is not None
    expected = Expectation(70.0, 75.0, 0.0, "a pilot")
    again = replace(manifest, expected=expected, runs=tuple(replace(r, attempts=1) for r in manifest.runs))
    expecter = Forecaster(plan, files, again, clock)
    assert expecter.update() is None
    assert expecter.ended() == replace(expected, actual_s=80.0)


def test_a_finished_campaign_tells_what_was_expected_of_it_and_what_it_took(campaign_file: Path) -> None:
    inline = ["campaign.launcher=inline"]
    first = run_campaign(campaign_file, inline)  # its few steps may be over before anything is known
    began = time.monotonic()
    second = run_campaign(campaign_file, inline)
    took_s = time.monotonic() - began
    found = read_manifest(CampaignFiles(second.directory).manifest)
    assert first.exit_code == second.exit_code == 0
    assert found is not None
    assert found.workers == 1  # inline, one at a time
    assert found.expected is not None
    assert found.expected.made_from == "4 earlier runs"
    assert found.expected.actual_s is not None
    assert 0 < found.expected.actual_s <= took_s
    reopen(second.directory).execute()
    again = read_manifest(CampaignFiles(second.directory).manifest)
    assert again is not None
    assert again.expected == found.expected  # nothing ran, so it took no other time


def test_a_manifest_without_expectations_is_read(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_manifest(path, new_manifest("c", "", [], tmp_path))
    old = {
        k: v for k, v in json.loads(path.read_text()).items() if k not in ("workers", "stagger_s", "expected")
    }
    path.write_text(json.dumps(old))
    found = read_manifest(path)
    assert found is not None
    assert (found.workers, found.expected) == (0, None)
