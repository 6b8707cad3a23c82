"""The remaining time of a running campaign, from the pace of its steps so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from retrain.plan.estimate.simulation import Simulation, quantile
from retrain.plan.estimate.workload import (
    ALONE,
    Alive,
    Crowding,
    Launching,
    Pilot,
    RunWork,
    StepCost,
    Workload,
)
from retrain.records.figures import Pace, median

MOST_DRAWS, LEAST_DRAWS = 60, 16  # few, so that `status` is fast; the spread is then known to about a fifth
DRAWN_RUNS = 6000  # runs simulated over all draws: takes some milliseconds
OWN_PACE_STEPS = 10  # from this many steps on, a run's own pace is used


@dataclass(frozen=True, slots=True)
class RunLeft:
    """A run with steps left, or a finished run whose pace is used for others."""

    run_id: str
    condition: str
    steps_left: int  # 0 for a run that ended
    is_running: bool
    pace: Pace | None


@dataclass(frozen=True, slots=True)
class Remaining:
    """Time until the last run ends."""

    p50_s: float
    p90_s: float


def remaining(
    runs: Sequence[RunLeft], workers: int, stagger_s: float = 0.0, crowding: Crowding = ALONE
) -> Remaining | None:
    """Estimate when the last run ends, of runs in launch order; 0 workers stand for the number running now.

    Returns:
        None if nothing is left, nothing is running, or no pace is known.
    """
    if crowding != ALONE:
        runs = _alone(runs, workers, crowding)
    left = [run for run in runs if run.steps_left > 0]
    active = [run for run in left if run.is_running]
    paces = _paces(runs)
    if not active or not paces:
        return None
    costs, counts = {}, {}
    works = []
    for run in sorted(left, key=lambda run: not run.is_running):  # stable: launch order within each
        pace = run.pace if run.is_running else None
        if pace is not None and pace.steps >= OWN_PACE_STEPS:
            key, step_s, steps = f"run {run.run_id}", pace.step_s, pace.steps
        else:
            condition = run.condition if run.condition in paces else ""
            key, (step_s, steps) = f"condition {condition}", paces[condition]
        costs[key], counts[key] = StepCost(step_s), steps
        works.append(RunWork(key, run.steps_left, run.is_running))
    startup_s = median(run.pace.startup_s for run in runs if run.pace) or 0.0
    launching = Launching(max(workers, len(active)), stagger_s, startup_s, crowding=crowding)
    recent = {run.run_id: run.pace.recent_s for run in runs if run.pace and len(run.pace.recent_s) > 1}
    simulation = Simulation(Workload(tuple(works), costs, launching), Pilot(recent, counts), seed=0)
    times = simulation.sample(max(LEAST_DRAWS, min(MOST_DRAWS, DRAWN_RUNS // len(left))))
    return Remaining(quantile(times, 0.5), quantile(times, 0.9))


def _alone(runs: Sequence[RunLeft], workers: int, crowding: Crowding) -> list[RunLeft]:
    """Return the runs with their paces converted to those of a run alone."""
    active = sum(run.is_running for run in runs)
    alive = Alive(map(_span, runs), max(workers, active))
    found = []
    for run in runs:
        if (pace := run.pace) is not None:
            times = crowding.of(max(1, active))
            if pace.since_s is not None and pace.until_s is not None:
                times = crowding.over(alive.between(pace.since_s, pace.until_s))
            startup_s = pace.startup_s and pace.startup_s / times
            pace = replace(pace, step_s=pace.step_s / times, startup_s=startup_s)
        found.append(replace(run, pace=pace))
    return found


def _span(run: RunLeft) -> tuple[float, float]:
    """Return a run's start and end from its rows; a running run without rows is always alive."""
    end = math.inf if run.is_running else -math.inf
    if run.pace is None or run.pace.since_s is None or run.pace.until_s is None:
        return -math.inf, end
    return run.pace.since_s - (run.pace.startup_s or 0.0), max(end, run.pace.until_s)


def _paces(runs: Sequence[RunLeft]) -> dict[str, tuple[float, int]]:
    """Return each condition's mean pace and the steps behind it; the key "" holds that of all runs."""
    sums: dict[str, tuple[float, int]] = {}
    for run in runs:
        if run.pace is not None:
            for key in (run.condition, ""):
                seconds, steps = sums.get(key, (0.0, 0))
                sums[key] = (seconds + run.pace.step_s * run.pace.steps, steps + run.pace.steps)
    return {key: (seconds / steps, steps) for key, (seconds, steps) in sums.items()}
