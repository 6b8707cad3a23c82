"""Estimates of campaigns whose workers slow each other down hold against simulated ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from retrain.campaign.calibrate.benchmarks import WorkerThroughput
from retrain.campaign.calibrate.conclude import Forecast
from retrain.config.load import parse
from retrain.plan.build import plan_runs
from retrain.plan.estimate import estimate_workload
from retrain.plan.estimate.history import learn, of_runs, read_run_times
from retrain.plan.estimate.remaining import remaining
from retrain.plan.estimate.simulation import makespan_s
from retrain.plan.estimate.wall_time import learned_for, wall_time, workload_of
from retrain.plan.estimate.workload import (
    ALONE,
    Alive,
    Crowding,
    Launching,
    RunWork,
    StepCost,
    Workload,
    on_cores,
)
from retrain.plan.matrix import Plan
from retrain.records.layout import CampaignFiles
from retrain.records.metrics import read_ends
from retrain.records.run_row import RunRow, pace_of
from retrain.records.run_state import RunState, read_attempts
from tests import crowded

CORES = 2.0
NAME = "c-20250131T120000Z-0a1b"


def plan_of(logs: Path, runs: int, workers: int, steps: int = 20) -> Plan:
    raw = {
        "logging": {"log_dir": str(logs)},
        "campaign": {
            "seeds": list(range(runs)),
            "max_steps": steps,
            "parallel": True,
            "max_workers": workers,
        },
    }
    return plan_runs(parse(raw, "c.toml", try_plugins=False), "c.toml")


def p50_s(plan: Plan, logs: Path) -> float:
    history = learn(logs)
    learned = learned_for(plan, history, CORES)
    assert learned is not None
    found = wall_time(plan, learned, CORES)
    return found.p50_s


@pytest.mark.parametrize(("runs", "workers"), [(24, 16), (5, 4), (9, 8), (7, 3)])
@pytest.mark.parametrize("measured_with", [1, 2, 16])
def test_a_half_empty_last_wave_is_estimated_to_go_faster(tmp_path, runs, workers, measured_with):
    pilot = plan_of(tmp_path, 24, measured_with)
    record(pilot, crowded.simulate(pilot, CORES))
    plan = plan_of(tmp_path, runs, workers)
    truth_s = crowded.end_s(crowded.simulate(plan, CORES, seed=1))
    assert p50_s(plan, tmp_path) == pytest.approx(truth_s, rel=0.05)


@pytest.mark.parametrize("share", [0.2, 0.3, 0.5, 0.7, 0.9])
def test_the_time_left_foresees_the_last_wave(tmp_path, share):
    plan = plan_of(tmp_path, 24, 16)
    runs = crowded.simulate(plan, CORES)
    truth_s = crowded.end_s(runs)
    files = record(plan, runs, share * truth_s)
    left = remaining(_left(plan, runs, files, share * truth_s), 16, crowding=on_cores(CORES))
    assert left is not None
    assert share * truth_s + left.p50_s == pytest.approx(truth_s, rel=0.05)


@pytest.mark.parametrize("workers", [4, 16])
def test_a_calibration_foresees_it_from_what_it_measured_side_by_side(tmp_path, workers):
    pilot = plan_of(tmp_path, 8, 16)
    files = record(pilot, crowded.simulate(pilot, CORES))
    measured = [run for path in sorted(files.runs.iterdir()) if (run := read_run_times(path)) is not None]
    side = [WorkerThroughput(n, 100.0 * min(n, CORES), 1.0) for n in (1, 2, 4, 8)]
    plan = plan_of(tmp_path, 24, workers)
    found = Forecast(of_runs(measured), side, CORES).of(plan)
    assert found is not None
    truth_s = crowded.end_s(crowded.simulate(plan, CORES, seed=1))
    assert found.p50_s == pytest.approx(truth_s, rel=0.05)


def test_shared_cores_leave_nothing_to_gain_from_more_workers(tmp_path):
    plan = plan_of(tmp_path, 24, 16)
    record(plan, crowded.simulate(plan, CORES))
    history = learn(tmp_path)
    found = estimate_workload(workload_of(plan, learned_for(plan, history, CORES)))
    assert [change.limit for change in found.changes] == []


def test_permits_and_crowding_add_up():
    costs = {"a": StepCost(1.0, 0.5)}
    how = Launching(4, permits=2, crowding=on_cores(2.0))
    found = estimate_workload(Workload((RunWork("a", 100),) * 8, costs, how))
    # steps take twice as long; so do calls, and four runs hold 0.5 permits each: almost no wait
    assert found.p50_s == pytest.approx(400, rel=0.15)
    alone = estimate_workload(Workload((RunWork("a", 100),) * 8, costs, replace(how, permits=None)))
    assert alone.p50_s == pytest.approx(400)


def sharing_a_core_s(seconds: list[float]) -> float:
    """Return when the last of some runs ends, two at a time on one core."""
    how = Launching(2, crowding=on_cores(1.0))
    return makespan_s([[[(0, alone_s)]] for alone_s in seconds], how, lambda n: (how.crowding.of(n[0]),), 1)


def test_runs_that_share_cores_end_by_processor_sharing():
    # two of 1 and 3 s share a core: the short one ends at 2, the long one alone from there on
    assert sharing_a_core_s([1.0, 3.0]) == pytest.approx(4.0)
    # the third begins at 2 and shares with the second, which has 2 s left then: both end at 6
    assert sharing_a_core_s([1.0, 3.0, 2.0]) == pytest.approx(6.0)


def test_crowding_is_linear_between_points_and_full_beyond():
    measured = Crowding(((1.0, 1.0), (4.0, 2.0)), is_full=True)
    assert [measured.of(n) for n in (0, 1, 2.5, 4, 8)] == [1.0, 1.0, 1.5, 2.0, 4.0]
    assert replace(measured, is_full=False).of(8) == 2.0
    assert ALONE.of(100) == 1.0


def test_work_is_done_in_stretches_of_its_own_pace():
    # 4 s beside three others on two cores do 2 s of work, 2 s alone do 2 s
    assert on_cores(2.0).over([(4.0, 4), (2.0, 1)]) == pytest.approx(6 / 4)


def test_runs_alive_are_counted_over_a_span():
    alive = Alive([(0.0, 10.0), (2.0, 6.0), (4.0, 12.0)])
    assert alive.between(0.0, 12.0) == ((2.0, 1), (2.0, 2), (2.0, 3), (4.0, 2), (2.0, 1))
    assert alive.between(5.0, 7.0) == ((1.0, 3), (1.0, 2))
    assert alive.between(20.0, 21.0) == ((1.0, 1),)
    assert Alive([(0.0, 9.0)] * 5, most=2).between(1.0, 2.0) == ((1.0, 2),)


def record(plan: Plan, runs: dict[str, crowded.Worked], until_s: float = 1e9) -> CampaignFiles:
    return crowded.record(plan, runs, NAME, until_s, CORES)


def _left(plan: Plan, runs: dict[str, crowded.Worked], files: CampaignFiles, now_s: float) -> list[RunRow]:
    found = []
    for run in plan.runs:
        worked, own = runs[run.run_id], files.run(run.run_id)
        is_begun, is_over = worked.began_s < now_s, worked.ends_s[-1] <= now_s
        ends = read_ends(own.metrics, 5) if is_begun else None
        steps = int(ends.last[-1]["step"]) if ends and ends.last else 0
        pace = pace_of(ends, read_attempts(own.attempts)) if ends else None
        state = RunState.DONE if is_over else RunState.RUNNING if is_begun else RunState.PENDING
        more = {"step": steps, "max_steps": run.max_steps, "pace": pace}
        found.append(RunRow(run_id=run.run_id, condition=run.condition, seed=run.seed, state=state, **more))
    return found
