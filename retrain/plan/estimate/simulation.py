"""Draws possible campaigns of one workload and simulates each until its last run ends."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence

from retrain.plan.crowding import ALONE, Crowding
from retrain.plan.estimate.bootstrap import Bootstrap, Tail
from retrain.plan.estimate.contention import Job, SharedCampaign
from retrain.plan.estimate.permit_queue import PermitQueue
from retrain.plan.estimate.workload import Pilot, StepCost, Workload

MOST_DRAWS = 200  # the P90 is then off by a tenth of the spread
LEAST_DRAWS = 24
DRAWN_RUNS = 24_000  # runs simulated over all draws: takes well under a second
STEP_CV_GUESSED = 0.1  # coefficient of variation of step times, if nothing was measured
GUESSED_RATIOS = 32


class Simulation:
    """Possible campaigns of one workload, and how long each takes."""

    def __init__(self, workload: Workload, pilot: Pilot | None, seed: int) -> None:
        self._workload = workload
        self._rng = random.Random(seed)
        self._bootstrap = Bootstrap(workload, pilot, self._rng)
        self._started = sum(run.is_started for run in workload.runs)
        self._queue = self._open_queue()
        self.tail: Tail = self._bootstrap.spread.tail

    def expected_s(self) -> float:
        """Return the makespan of the campaign of means."""
        return self._makespan_s(*self._bootstrap.expected())

    def sample(self, most: int = MOST_DRAWS) -> list[float]:
        """Return makespans of possible campaigns; a single one if all are equal."""
        if self._bootstrap.is_certain:
            return [self.expected_s()]
        draws = min(most, max(LEAST_DRAWS, min(MOST_DRAWS, DRAWN_RUNS // max(1, len(self._workload.runs)))))
        return [self._makespan_s(*self._bootstrap.draw()) for _ in range(draws)]

    def permit_wait_fraction(self) -> float:
        """Return the fraction of a step's time spent waiting, with all workers on the first runs."""
        costs, jobs = self._bootstrap.expected()
        active = jobs[: self._workload.launching.workers]
        counts = tuple(sum(job.condition == c for job in active) for c in range(len(costs)))
        if self._queue is None:
            return 0.0
        self._queue.forget()
        wait_s = self._queue.wait_s(costs, counts)
        crowd = self._workload.full_crowding
        calling = [crowd * costs[job.condition].seconds for job in active if costs[job.condition].permit_s]
        return wait_s / (wait_s + sum(calling) / len(calling)) if calling else 0.0

    def _makespan_s(self, costs: Sequence[StepCost], jobs: Sequence[Job]) -> float:
        how = self._workload.launching
        if self._queue is not None:
            return SharedCampaign(jobs, costs, how, self._queue, self._started).makespan_s()
        return list_schedule(
            [self._attempts_s(job, costs[job.condition].seconds, i) for i, job in enumerate(jobs)],
            how.workers,
            stagger_s=how.stagger_s,
            retry_delay_s=how.failures.delay_s,
            started=self._started,
            crowding=how.crowding,
        )

    def _attempts_s(self, job: Job, step_s: float, place: int) -> list[float]:
        how = self._workload.launching
        seconds = [how.startup_s + steps * step_s for steps in job.attempts]
        seconds[-1] += how.closing_s
        if place < self._started:
            seconds[0] -= how.startup_s
        return seconds

    def _open_queue(self) -> PermitQueue | None:
        how, runs = self._workload.launching, self._workload.runs
        costs, jobs = self._bootstrap.expected()
        if how.permits is None or not any(cost.permit_s for cost in costs):
            return None
        ratios = self._bootstrap.spread.ratios or _guessed_ratios()
        order = [job.condition for job in jobs]
        most = min(how.workers, len(runs))
        queue = PermitQueue(costs, how.permits, order, most, ratios, self._rng, how.crowding)
        return queue if queue.can_wait else None


def quantile(values: Sequence[float], q: float) -> float:
    """Return a quantile, linear between neighbours."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _guessed_ratios() -> list[float]:
    width = STEP_CV_GUESSED * math.sqrt(3)  # half-width of the uniform distribution with this deviation
    return [1 + width * (2 * (i + 0.5) / GUESSED_RATIOS - 1) for i in range(GUESSED_RATIOS)]


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
        places: number of workers.
        stagger_s: least time between two launches.
        retry_delay_s: from a failure until the next attempt is due; a due retry goes first.
        started: number of first runs that are already running.
        crowding: slowdown by concurrent runs.
    """
    busy = [(attempts[0], run, 0) for run, attempts in enumerate(runs[:started])]  # by work at their end
    heapq.heapify(busy)
    retries: list[tuple[float, int, int]] = []
    waiting, now, work, next_launch = started, 0.0, 0.0, 0.0  # work: seconds alone, per busy run
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
    """Return when the next run is launched: a waiting run, else a due retry."""
    return earliest if is_any_waiting else max(earliest, due)
