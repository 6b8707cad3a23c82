"""How long a live campaign still takes, from the pace of its runs so far.

A run's pace is that of the second half of its steps: the first ones are often unlike all others, and what
changes slowly (a busier machine, longer completions) has changed the last ones most. The runs alive at the
time are taken out of a pace, and put in again by the simulation. All runs share a machine or a server whose
speed drifts, so their errors do not cancel: P90 allows for a drift, judged by that between the two halves.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from retrain.plan.estimate.simulation import Simulation, ninth_decile, widened
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
from retrain.records.metrics import median
from retrain.records.run_row import Pace, RunRow
from retrain.records.run_state import RunState

QUICK_DRAWS, FEWEST_DRAWS = 60, 16  # few, so that `status` is fast: the spread is known to a fifth
QUICK_RUNS = 6000  # runs simulated over all draws: takes some milliseconds
OWN_PACE_STEPS = 10  # from this many steps on, a run's own pace is used
OWN_PACE_SHARE = 0.1  # of the most steps of a run of its condition: a pace from fewer tells nothing
GUESS_WEIGHT = 2.0  # of the guessed drift: it counts as much as so many measured changes
MOST_CHANGE = 0.3  # of the pace, as a logarithm: more is a start that is unlike the rest


@dataclass(frozen=True, slots=True)
class Remaining:
    """Time until the last run ends."""

    p50_s: float
    p90_s: float


@dataclass(frozen=True, slots=True)
class Speed:
    """A run's pace, as if it were alone."""

    run: str
    condition: str
    is_running: bool
    step_s: float  # over the second half of its steps
    steps: float  # behind it
    recent_s: tuple[float, ...]
    startup_s: float | None
    closing_s: float | None
    change: float  # logarithm of its ratio to that of the first half


def remaining(
    rows: Sequence[RunRow],
    workers: int,
    stagger_s: float = 0.0,
    crowding: Crowding = ALONE,
    *,
    is_supervised: bool = True,
) -> Remaining | None:
    """Estimate when the last run ends, of runs in launch order; 0 workers stand for the number running now.

    What follows a run's last step, such as its last evaluation, is only known once a run is done.

    Without an orchestrator, runs that have not begun are left out: nothing would start them.

    Returns:
        None if nothing is left, nothing is running, or no pace is known.
    """
    active = sum(map(_is_running, rows))
    alive = Alive(map(_span, rows), max(workers, active)) if crowding != ALONE else Alive(())
    speeds = [_speed(row, row.pace, alive, active, crowding) for row in rows if row.pace]
    left = [row for row in rows if row.steps_left and (is_supervised or _is_running(row))]
    if not speeds or not any(map(_is_running, left)):
        return None
    startup_s = median(speed.startup_s for speed in speeds) or 0.0
    closing_s = median(speed.closing_s for speed in speeds) or 0.0
    launching = Launching(max(workers, active), stagger_s, startup_s, closing_s, crowding=crowding)
    left.sort(key=_is_running, reverse=True)  # stable: launch order within each
    paces = _paces(speeds)
    works = []
    for row in left:
        keys = f"run {row.run_id}", f"condition {row.condition}", ""
        key = next(key for key in keys if key in paces)
        works.append(RunWork(key, row.steps_left, _is_running(row)))
    costs = {work.condition: StepCost(paces[work.condition][0]) for work in works}
    recent = {speed.run: speed.recent_s for speed in speeds if len(speed.recent_s) > 1}
    pilot = Pilot(recent, {key: round(paces[key][1]) for key in costs})
    simulation = Simulation(Workload(tuple(works), costs, launching), pilot, seed=0)
    times = simulation.sample(max(FEWEST_DRAWS, min(QUICK_DRAWS, QUICK_RUNS // len(left))))
    p50_s, p90_s = statistics.median(times), ninth_decile(times)
    return Remaining(p50_s, widened(p50_s, p90_s, drift(speeds, crowding.drift)))


def without_ends(rows: Sequence[RunRow]) -> str:
    """Return what `remaining` leaves out, as no run has ended yet, in words that follow a time."""
    is_known = any(row.pace and row.pace.closing_s is not None for row in rows)
    return "" if is_known else ", without the evaluations at the end"


def drift(speeds: Sequence[Speed], guess: float) -> float:
    """Return the standard deviation of the pace to come, relative to that so far, which all runs share."""
    running = [speed for speed in speeds if speed.is_running]
    steps = math.fsum(speed.steps for speed in running)
    change = math.fsum(speed.steps * speed.change for speed in running) / steps if steps else 0.0
    square = min(abs(change), MOST_CHANGE) ** 2 / 2  # of two halves, each of which has drifted
    return math.sqrt((GUESS_WEIGHT * guess**2 + square) / (GUESS_WEIGHT + 1))


def _paces(speeds: Sequence[Speed]) -> dict[str, tuple[float, float]]:
    """Return the mean step time, and the steps behind it, of runs, of conditions and (the key "") of all."""
    most = {speed.condition: speed.steps for speed in sorted(speeds, key=lambda speed: speed.steps)}
    sums: dict[str, tuple[float, float]] = {}
    for speed in speeds:
        if speed.steps < OWN_PACE_SHARE * most[speed.condition]:
            continue
        keys = [f"condition {speed.condition}", ""]
        if speed.is_running and speed.steps >= OWN_PACE_STEPS:
            keys.append(f"run {speed.run}")
        for key in keys:
            seconds, steps = sums.get(key, (0.0, 0.0))
            sums[key] = (seconds + speed.step_s * speed.steps, steps + speed.steps)
    return {key: (seconds / steps, steps) for key, (seconds, steps) in sums.items()}


def _is_running(row: RunRow) -> bool:
    return row.state == RunState.RUNNING


def _span(row: RunRow) -> tuple[float, float]:
    """Return a run's start and end from its rows; a running run without rows is always alive."""
    end = math.inf if _is_running(row) else -math.inf
    if row.pace is None or row.pace.since_s is None or row.pace.until_s is None:
        return -math.inf, end
    since_s = row.pace.since_s - (row.pace.startup_s or 0.0)
    return min(since_s, row.pace.middle_s or since_s), max(end, row.pace.until_s)


def _speed(row: RunRow, pace: Pace, alive: Alive, active: int, crowding: Crowding) -> Speed:
    def crowd(since_s: float | None, until_s: float | None) -> float:
        if since_s is None or until_s is None or crowding == ALONE:
            return crowding.of(max(1, active))
        return crowding.over(alive.between(since_s, until_s))

    whole = crowd(pace.since_s, pace.until_s)
    step_s, steps, change = pace.step_s / whole, float(pace.steps), 0.0
    if pace.late_s and pace.late_steps:
        early_s = pace.steps * pace.step_s - pace.late_steps * pace.late_s  # below 0 after a resume
        early_s /= max(1.0, pace.steps - pace.late_steps) * crowd(pace.since_s, pace.middle_s)
        step_s, steps = pace.late_s / crowd(pace.middle_s, pace.until_s), pace.late_steps
        change = math.log(step_s / early_s) if early_s > 0 else 0.0
    return Speed(
        row.run_id,
        row.condition,
        _is_running(row),
        step_s,
        steps,
        pace.recent_s,
        pace.startup_s and pace.startup_s / whole,
        pace.closing_s and pace.closing_s / whole,
        change,
    )
