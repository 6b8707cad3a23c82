"""How long a campaign takes: the rule of thumb, and a simulation of its events.

The rule of thumb divides total work by parallelism, so it is only a lower bound: ten runs on four
workers take three waves, not two and a half. The simulation launches runs as the orchestrator does: in
order, on free workers, with stagger, start-up, waits for permits and retries.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from retrain.plan.estimate.bootstrap import Tail
from retrain.plan.estimate.limits import Change, Limit, find_limit
from retrain.plan.estimate.simulation import Simulation, quantile
from retrain.plan.estimate.workload import Launching, Pilot, RunWork, StepCost, Workload

STEPS_GUESSED = 500  # of a run of which only the seconds are known
LENGTH_CLASSES = 8  # such runs are grouped into this many classes by length


@dataclass(frozen=True)
class Makespan:
    """Wall time of a campaign and what limits it."""

    p50_s: float
    p90_s: float
    waves: int
    runs: int
    limited_by: Limit
    changes: tuple[Change, ...]  # that would shorten it, the best first
    rule_of_thumb_s: float  # total work / parallelism; a lower bound
    permit_wait_fraction: float  # of a step's time with all workers busy
    tail: Tail  # none: no pilot; short or heavy: P90 is not reliable

    @property
    def next_workers(self) -> int:
        """The smallest number of workers that would save a wave."""
        return math.ceil(self.runs / max(1, self.waves - 1))

    @property
    def is_p90_reliable(self) -> bool:
        """Whether the pilot was long enough, given how its step times vary."""
        return self.tail == "light"


def rule_of_thumb_s(total_steps: float, median_step_time_s: float, effective_parallelism: int) -> float:
    """Return total_steps x median_step_time / effective_parallelism, in seconds."""
    return total_steps * median_step_time_s / effective_parallelism


def estimate_makespan(
    run_seconds: Sequence[float],
    workers: int,
    stagger_s: float = 0.0,
    startup_s: float = 0.0,
    permits: int | None = None,
    remote_fraction: float = 0.0,
    seed: int = 0,
) -> Makespan:
    """Simulate launching the runs in order on `workers` workers, and return the time until the last run ends.

    Runs are assumed to have the same number of steps; `estimate` accepts more detail.

    Args:
        run_seconds: how long each run would take alone, in launch order.
        workers: runs at a time.
        stagger_s: least time between two launches.
        startup_s: added to every run.
        permits: API calls in flight over all runs; None if not limited.
        remote_fraction: share of a step spent in API calls, in [0, 1].
        seed: for the simulated queue for permits; without a pilot P50 and P90 are equal.

    Raises:
        ValueError: a time is negative or not finite, or there is no worker or permit.
    """
    if not 0 <= remote_fraction <= 1:
        raise ValueError(f"remote_fraction = {remote_fraction} is not in [0, 1]")
    if not all(math.isfinite(t) and t >= 0 for t in run_seconds):
        raise ValueError("run_seconds must be finite and not negative")
    ordered = sorted(run_seconds)
    tops = sorted(set(ordered))
    if len(tops) > LENGTH_CLASSES:  # runs of similar length become one condition; their lengths stay
        size = math.ceil(len(ordered) / LENGTH_CLASSES)
        tops = sorted({*ordered[size - 1 :: size], ordered[-1]})
    seconds = {top: top / STEPS_GUESSED for top in tops}  # of a step
    costs = {repr(top): StepCost(step_s, step_s * remote_fraction) for top, step_s in seconds.items()}
    runs = []
    for run_s in run_seconds:
        top = tops[bisect.bisect_left(tops, run_s)]
        runs.append(RunWork(repr(top), STEPS_GUESSED * run_s / top if top else 0.0))
    launching = Launching(workers, stagger_s, startup_s, permits=permits)
    return estimate(Workload(tuple(runs), costs, launching), seed=seed)


def estimate(workload: Workload, pilot: Pilot | None = None, seed: int = 0) -> Makespan:
    """Estimate how long a campaign, or the rest of one, takes.

    Args:
        workload: the runs, their step costs and how they are launched.
        pilot: measured step times, which determine how uncertain the costs are; without it P50 and P90
            are equal, unless runs fail.
        seed: the same seed gives the same estimate.
    """
    simulation = Simulation(workload, pilot, seed)
    times = simulation.sample()
    expected = simulation.expected_s()
    limit, changes = find_limit(workload, expected, lambda other: Simulation(other, pilot, seed).expected_s())
    return Makespan(
        p50_s=quantile(times, 0.5),
        p90_s=quantile(times, 0.9),
        waves=workload.waves,
        runs=len(workload.runs),
        limited_by=limit,
        changes=changes,
        rule_of_thumb_s=workload.total_s / max(1, min(workload.launching.workers, len(workload.runs))),
        permit_wait_fraction=simulation.permit_wait_fraction(),
        tail=simulation.tail,
    )
