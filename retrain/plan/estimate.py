"""How long a campaign takes: the rule of thumb, and a simulation of its launches.

The rule of thumb divides total work by parallelism, so it is never more than a lower bound: ten
runs on four workers take three waves, not two and a half.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Limit = Literal["workers", "permits", "last wave", "stagger", "slowest run"]


@dataclass(frozen=True)
class Makespan:
    """Wall time of a campaign and what limits it."""

    p50_s: float
    p90_s: float
    waves: int
    limited_by: Limit


def rule_of_thumb_s(total_steps: int, median_step_time_s: float, effective_parallelism: int) -> float:
    """Give total_steps x median_step_time / effective_parallelism, in seconds."""
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
    """Simulate launches in order onto `workers` places and give the time until the last run ends.

    Args:
        run_seconds: how long each run would take alone, in launch order.
        workers: runs at a time.
        stagger_s: least time between two launches.
        startup_s: added to every run.
        permits: API calls in flight over all runs; None if not limited.
        remote_fraction: share of a run spent in API calls, in [0, 1].
        seed: kept for estimates with spread; without spread P50 and P90 are equal.

    Raises:
        ValueError: a time is negative or not finite, or there is no worker or permit.
    """
    del seed
    _check(run_seconds, workers, stagger_s, startup_s, permits, remote_fraction)
    slowdown = _permit_slowdown(min(workers, len(run_seconds)), permits, remote_fraction)
    durations = [startup_s + seconds * slowdown for seconds in run_seconds]
    ends = _ends(durations, workers, stagger_s)
    total = max(ends, default=0.0)
    waves = math.ceil(len(durations) / workers)
    return Makespan(total, total, waves, _limit(durations, workers, stagger_s, slowdown, total))


def _ends(durations: Sequence[float], workers: int, stagger_s: float) -> list[float]:
    free = [0.0] * min(workers, len(durations))
    heapq.heapify(free)
    next_launch, ends = 0.0, []
    for duration in durations:
        start = max(heapq.heappop(free), next_launch)
        next_launch = start + stagger_s
        ends.append(start + duration)
        heapq.heappush(free, start + duration)
    return ends


def _permit_slowdown(active: int, permits: int | None, remote_fraction: float) -> float:
    """With more runs in calls than permits, calls take turns: a run's step grows by the overload."""
    if permits is None or remote_fraction == 0:
        return 1.0
    return max(1.0, active * remote_fraction / permits)


def _limit(
    durations: Sequence[float], workers: int, stagger_s: float, slowdown: float, total: float
) -> Limit:
    if slowdown > 1:
        return "permits"
    if len(durations) <= workers:
        return "stagger" if stagger_s * (len(durations) - 1) > max(durations, default=0) else "slowest run"
    even = sum(durations) / workers
    return "last wave" if total > 1.1 * even else "workers"


def _check(
    run_seconds: Sequence[float],
    workers: int,
    stagger_s: float,
    startup_s: float,
    permits: int | None,
    remote_fraction: float,
) -> None:
    times = [*run_seconds, stagger_s, startup_s]
    if not all(math.isfinite(t) and t >= 0 for t in times):
        raise ValueError("run_seconds, stagger_s and startup_s must be finite and not negative")
    if workers < 1 or (permits is not None and permits < 1):
        raise ValueError(f"workers = {workers} and permits = {permits} must be at least 1")
    if not 0 <= remote_fraction <= 1:
        raise ValueError(f"remote_fraction = {remote_fraction} is not in [0, 1]")
