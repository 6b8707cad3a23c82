"""List scheduling: runs take places in launch order, as the orchestrator gives them out."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from retrain.plan.crowding import ALONE, Crowding


def list_schedule(
    runs: Sequence[Sequence[float]],
    places: int,
    *,
    stagger_s: float = 0.0,
    retry_delay_s: float = 0.0,
    started: int = 0,
    crowding: Crowding = ALONE,
) -> float:
    """Return the time at which the last run ends.

    Args:
        runs: the seconds that each run's attempts take alone, in launch order; all but the last one fail.
        places: runs at a time.
        stagger_s: least time between two launches.
        retry_delay_s: from a failure to the next attempt's being due, which then goes first.
        started: so many of the first runs hold places already.
        crowding: how much longer they take beside each other.
    """
    busy = [(attempts[0], run, 0) for run, attempts in enumerate(runs[:started])]  # by work done at the end
    heapq.heapify(busy)
    retries: list[tuple[float, int, int]] = []
    waiting, now, work, next_launch = started, 0.0, 0.0, 0.0  # work: seconds alone that each busy run got
    while busy or retries or waiting < len(runs):
        due = retries[0][0] if retries else math.inf
        at = _launch_at(max(now, next_launch), due, waiting < len(runs)) if len(busy) < places else math.inf
        pace = crowding.of(len(busy))
        end = now + (busy[0][0] - work) * pace if busy else math.inf
        if end <= at:
            work, run, attempt = heapq.heappop(busy)
            now = end
            if attempt + 1 < len(runs[run]):
                heapq.heappush(retries, (end + retry_delay_s, run, attempt + 1))
            continue
        if due <= at:
            _, run, attempt = heapq.heappop(retries)
        else:
            run, attempt, waiting = waiting, 0, waiting + 1
        work += (at - now) / pace
        now, next_launch = at, at + stagger_s
        heapq.heappush(busy, (work + runs[run][attempt], run, attempt))
    return now


def _launch_at(earliest: float, due: float, is_any_waiting: bool) -> float:
    """Return when the next run is launched: one that waits, else a retry that is due."""
    return earliest if is_any_waiting else max(earliest, due)
