"""Forecasts a campaign's wall time, as it is and with changes, from the calibration's runs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from retrain.calibrate.facts import WorkersMeasured
from retrain.plan.crowding import ALONE, Crowding
from retrain.plan.estimate.history import of_runs
from retrain.plan.estimate.learned import learned_for
from retrain.plan.estimate.measured import MeasuredRun
from retrain.plan.estimate.wall_time import WallTime, wall_time
from retrain.plan.matrix import Plan
from retrain.plan.warnings import shares_cores


class Forecast:
    """Estimates plans from a pilot, with the slowdown that was measured among concurrent workers."""

    def __init__(self, runs: Sequence[MeasuredRun], side: Sequence[WorkersMeasured], cores: float) -> None:
        """Take the measurements.

        Args:
            runs: the pilot's.
            side: measurements with each number of concurrent workers.
            cores: of this machine.
        """
        self._history = of_runs(run.directory for run in runs)
        self._side = side
        self._cores = cores

    def of(self, plan: Plan, longer: float = 0.0) -> WallTime | None:
        """Return the wall time of a plan whose steps take longer by a fraction; None if no time is known."""
        if not self._history.runs:
            return None
        history = replace(self._history, runs=tuple(run.slowed(1 + longer) for run in self._history.runs))
        crowding = crowding_between(self._side, self._cores if shares_cores(plan) else 0.0)
        learned = learned_for(plan, history, self._cores, crowding)
        return wall_time(plan, learned, history, self._cores)

    def by_workers(self, plan: Plan) -> Mapping[int, float]:
        """Return P50 in seconds for each number of workers tried, and for the plan's own.

        Where each worker keeps a core busy, more workers than cores are not considered.
        """
        most = min(len(plan.runs), max(1, int(self._cores)) if shares_cores(plan) else len(plan.runs))
        counts = {m.workers for m in self._side if m.workers <= most} | {plan.workers}
        found: dict[int, float] = {}
        for count in sorted(counts):
            time = self.of(replace(plan, campaign=replace(plan.campaign, parallel=True, max_workers=count)))
            if time is not None:
                found[count] = time.p50_s
        return found


def crowding_between(side: Sequence[WorkersMeasured], shared_cores: float) -> Crowding | None:
    """Return how many times longer a step takes among others; None if that was not measured.

    Waits for permits are excluded: the estimate simulates them.

    Args:
        side: measurements with each number of concurrent workers.
        shared_cores: that all workers share, each keeping one busy; 0 if they share none.
    """
    pace = {
        m.workers: m.workers * (1 - m.permit_wait_fraction) / m.tokens_per_second
        for m in sorted(side, key=lambda m: m.workers)
        if m.tokens_per_second
    }
    if len(pace) < 2:
        return None if shared_cores else ALONE
    first = pace[min(pace)]
    times = itertools.accumulate((one / first for one in pace.values()), max)  # more workers speed up no step
    points = [(float(count), times_as_long) for count, times_as_long in zip(pace, times, strict=True)]
    if points[-1][0] < shared_cores:
        points.append((shared_cores, points[-1][1]))
    return Crowding(tuple(points), is_full=shared_cores > 0)
