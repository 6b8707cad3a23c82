"""Estimates of what the steps of earlier runs do not show: workers that share cores, and a busier machine."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from retrain.campaign.calibrate.benchmarks import WorkerThroughput
from retrain.campaign.calibrate.conclude import Forecast
from retrain.config.load import parse
from retrain.plan.build import plan_runs
from retrain.plan.estimate.history import learn, of_runs, read_run_times, write_crowding
from retrain.plan.estimate.wall_time import WallTime, learned_for, wall_time
from retrain.plan.estimate.workload import CROWDED_DRIFT, NORMAL_P90, Crowding
from retrain.plan.matrix import Plan
from retrain.records.manifest import Expectation
from tests.recorded import record_campaign


def plan_of(logs: Path, workers: int, launcher: str = "local") -> Plan:
    raw = {
        "logging": {"log_dir": str(logs)},
        "campaign": {
            "seeds": list(range(8)),
            "max_steps": 10,
            "parallel": True,
            "max_workers": workers,
            "launcher": launcher,
        },
    }
    return plan_runs(parse(raw, "c.toml", try_plugins=False), "c.toml")


def estimated(plan: Plan, logs: Path) -> WallTime:
    history = learn(logs)
    learned = learned_for(plan, history, cores=2.0)
    assert learned is not None
    return wall_time(plan, learned, cores=2.0)


@pytest.mark.parametrize(
    ("measured_with", "workers", "p50_s"),
    [(2, 2, 40.0), (1, 2, 40.0), (2, 4, 40.0), (1, 8, 40.0), (4, 2, 20.0), (4, 1, 40.0)],
)
def test_workers_beyond_the_cores_take_turns(tmp_path, measured_with, workers, p50_s):
    record_campaign(plan_of(tmp_path, measured_with), "c-20250131T120000Z-0a1b", closing_s=0.0)
    assert estimated(plan_of(tmp_path, workers), tmp_path).p50_s == pytest.approx(p50_s)


def test_a_cluster_has_cores_of_its_own(tmp_path):
    record_campaign(plan_of(tmp_path, 2), "c-20250131T120000Z-0a1b", closing_s=0.0)
    assert estimated(plan_of(tmp_path, 8, launcher="slurm"), tmp_path).p50_s == pytest.approx(10.0)


def test_that_steps_were_stretched_is_said(tmp_path):
    record_campaign(plan_of(tmp_path, 2), "c-20250131T120000Z-0a1b", closing_s=0.0)
    assert any("with 4 on 2 CPU cores" in note for note in estimated(plan_of(tmp_path, 4), tmp_path).notes)
    assert not any("CPU cores" in note for note in estimated(plan_of(tmp_path, 2), tmp_path).notes)


def p90_by_hand() -> float:
    """Return P90 of 8 runs of 10 s, two at a time, given 9 equal runs on a machine that they keep busy."""
    run = math.sqrt(0.08**2 / (1 + 8))  # a guess of 8 % counts as one of the nine differences; none was seen
    greater_of_two = 1.632  # normal score: NormalDist().cdf(1.632) ** 2 is 0.9
    of_four_runs = greater_of_two * run / math.sqrt(4)
    of_the_pilots_mean = NORMAL_P90 * run / math.sqrt(9)
    return 40.0 * math.exp(math.hypot(of_four_runs, of_the_pilots_mean, NORMAL_P90 * CROWDED_DRIFT))


@pytest.mark.parametrize(("campaigns", "p90_s"), [(3, p90_by_hand()), (4, 1.5 * 40.0)])
def test_p90_holds_what_earlier_campaigns_took_beyond_their_estimates(tmp_path, campaigns, p90_s):
    late = Expectation(100.0, 110.0, 0.0, "earlier runs", actual_s=150.0)
    for day in range(campaigns):
        record_campaign(plan_of(tmp_path, 2), f"c-2025013{day}T120000Z-0a1b", late, closing_s=0.0)
    found = estimated(plan_of(tmp_path, 2), tmp_path)
    assert (found.p50_s, found.p90_s) == (pytest.approx(40.0), pytest.approx(p90_s, abs=0.05))
    assert any("P90 would be 44 s" in note for note in found.notes) == (campaigns == 4)


def test_a_lucky_probe_advises_no_more_workers_than_cores(tmp_path):
    files = record_campaign(plan_of(tmp_path, 2), "c-20250131T120000Z-0a1b", closing_s=0.0)
    history = of_runs([run for path in files.runs.iterdir() if (run := read_run_times(path)) is not None])
    side = [WorkerThroughput(n, 100.0 * n, 1.0) for n in (1, 2, 4, 8)]
    assert set(Forecast(history, side, cores=2.0).by_workers(plan_of(tmp_path, 2))) == {1, 2}
    assert set(Forecast(history, side, cores=2.0).by_workers(plan_of(tmp_path, 4))) == {1, 2, 4}


def test_the_slowdown_that_a_calibration_measured_is_used_from_its_benchmarks(tmp_path):
    calibration = tmp_path / "calibrations" / "c-20250131T115900Z-0a1b"
    calibration.mkdir(parents=True)
    pilot = record_campaign(plan_of(calibration, 2), "pilot-20250131T120000Z-0a1b", closing_s=0.0).directory
    assert estimated(plan_of(tmp_path, 8), pilot).p50_s == pytest.approx(40.0)
    write_crowding(calibration, Crowding(((1.0, 1.0), (2.0, 1.0), (4.0, 3.0)), is_full=True))
    assert estimated(plan_of(tmp_path, 8), pilot).p50_s == pytest.approx(60.0)
    measured, beyond = (estimated(plan_of(tmp_path, workers), pilot) for workers in (4, 8))
    assert (measured.slowdown, beyond.slowdown) == (3.0, None)
    assert [any("CPU cores" in note for note in found.notes) for found in (measured, beyond)] == [False, True]
    for damaged in ("[[1]]", "[]", "[[1, 0]]", "[[1, -2]]", "[[0, 1]]", "[[4, 1], [2, 2]]"):
        (calibration / "crowding.json").write_text(f'{{"points": {damaged}, "is_full": true}}')
        assert estimated(plan_of(tmp_path, 8), pilot).p50_s == pytest.approx(40.0)
