"""List scheduling: runs take places in launch order, as the orchestrator gives them out."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def list_schedule(
    runs: Sequence[Sequence[float]],
    places: int,
    *,
    stagger_s: float = 0.0,
    retry_delay_s: float = 0.0,
    started: int = 0,
) -> float:
    """Give the time at which the last run ends.

    Args:
        runs: the seconds of each run's attempts, in launch order; all but the last one fail.
        places: runs at a time.
        stagger_s: least time between two launches.
        retry_delay_s: from a failure to the next attempt's being due, which then goes first.
        started: so many of the first runs hold places already.
    """
    busy = [(attempts[0], run, 0) for run, attempts in enumerate(runs[:started])]
    heapq.heapify(busy)
    retries: list[tuple[float, int, int]] = []
    waiting, now, next_launch, last = started, 0.0, 0.0, 0.0
    unfinished = sum(map(len, runs))
    while unfinished:
        is_full, all_launched = len(busy) >= places, waiting == len(runs)
        due = retries[0][0] if retries else math.inf
        if is_full or (all_launched and busy and busy[0][0] <= max(due, next_launch)):
            end, run, attempt = heapq.heappop(busy)
            unfinished -= 1
            now = max(now, end)
            last = max(last, end)
            if attempt + 1 < len(runs[run]):
                heapq.heappush(retries, (end + retry_delay_s, run, attempt + 1))
            continue
        at = max(now, next_launch)
        if due <= at or all_launched:
            due, run, attempt = heapq.heappop(retries)
            at = max(at, due)
        else:
            run, attempt, waiting = waiting, 0, waiting + 1
        next_launch = at + stagger_s
        heapq.heappush(busy, (at + runs[run][attempt], run, attempt))
    return last
