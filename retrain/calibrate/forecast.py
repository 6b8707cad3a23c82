"""What a campaign would take as it is, and with changes, by the calibration's own runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from retrain.calibrate.facts import WorkersMeasured
from retrain.plan.history import of_runs
from retrain.plan.learned import learned_for
from retrain.plan.matrix import Plan
from retrain.plan.measured import MeasuredRun
from retrain.plan.wall_time import WallTime, wall_time
from retrain.plan.warnings import shares_cores


class Forecast:
    """Estimates plans from a pilot, whose steps slow down beside others as they were seen to."""

    def __init__(
        self, runs: Sequence[MeasuredRun], at_a_time: int, side: Sequence[WorkersMeasured], cores: float
    ) -> None:
        """Take what was measured.

        Args:
            runs: the pilot's.
            at_a_time: how many of them were.
            side: what so many workers did side by side.
            cores: of this machine.
        """
        self._history = of_runs(run.directory for run in runs)
        self._at_a_time = at_a_time
        self._side = side
        self._cores = cores

    def of(self, plan: Plan, longer: float = 0.0) -> WallTime | None:
        """Estimate a plan whose steps take longer by a fraction; None if no time is known."""
        if not self._history.runs:
            return None
        factor = slowdown(self._side, self._at_a_time, plan.workers) * (1 + longer)
        history = replace(self._history, runs=tuple(run.slowed(factor) for run in self._history.runs))
        return wall_time(plan, learned_for(plan, history, self._cores), history, self._cores)

    def by_workers(self, plan: Plan) -> Mapping[int, float]:
        """Give P50 in seconds for each number of workers that was tried, and for the plan's own.

        More workers than cores win nothing where each keeps one busy, whatever a short probe says.
        """
        most = min(len(plan.runs), max(1, int(self._cores)) if shares_cores(plan) else len(plan.runs))
        counts = {m.workers for m in self._side if m.workers <= most} | {plan.workers}
        found: dict[int, float] = {}
        for count in sorted(counts):
            time = self.of(replace(plan, campaign=replace(plan.campaign, parallel=True, max_workers=count)))
            if time is not None:
                found[count] = time.p50_s
        return found


def slowdown(side: Sequence[WorkersMeasured], measured_at: int, wanted: int) -> float:
    """Give how many times longer a step takes beside so many others than in the pilot.

    Waits for permits are not in it: the estimate simulates them.
    """
    pace = {
        m.workers: m.workers * (1 - m.permit_wait_fraction) / m.tokens_per_second
        for m in side
        if m.tokens_per_second
    }
    if not pace:
        return 1.0
    nearest = {n: min(pace, key=lambda have: abs(have - n)) for n in (measured_at, wanted)}
    return pace[nearest[wanted]] / pace[nearest[measured_at]]
