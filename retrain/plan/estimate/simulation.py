"""Draws possible campaigns of one workload, or the rest of one, and simulates each until its last run ends.

Between two events (a launch, the end of a phase) the same runs are alive, so each works at a constant
pace. Only events are simulated, a few per run.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from operator import add
from typing import TypeAlias

from retrain.plan.estimate.bootstrap import Bootstrap, DrawnRun, Tail
from retrain.plan.estimate.permit_queue import PermitQueue
from retrain.plan.estimate.workload import NORMAL_P90, Launching, Pilot, StepCost, Workload

MOST_DRAWS = 200  # the P90 is then off by a tenth of the spread
LEAST_DRAWS = 24
DRAWN_RUNS = 24_000  # runs simulated over all draws: takes well under a second
STEP_CV_GUESSED = 0.1  # coefficient of variation of step times, if nothing was measured
GUESSED_RATIOS = 32

PhaseWork: TypeAlias = tuple[int, float]  # a pace's index, and the work to do at that pace
Ends: TypeAlias = list[list[tuple[float, int, int, int]]]  # heaps: `done` at the end, run, attempt, phase
PaceOf: TypeAlias = Callable[[Sequence[int]], Sequence[float]]  # runs in a phase of each pace -> s per work


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
        return [self._makespan_s(*campaign) for campaign in self._campaigns(most)]

    def bounded(self) -> list[tuple[float, float]]:
        """Return makespans as `sample` does, each with its work over parallelism, which is no longer."""
        how = self._workload.launching
        places = range(1, min(how.workers, len(self._workload.runs)) + 1)
        pace = max((alive / how.crowding.of(alive) for alive in places), default=1.0)
        return [
            (self._makespan_s(*campaign), self._work_s(*campaign) / pace)
            for campaign in self._campaigns(MOST_DRAWS)
        ]

    def _campaigns(self, most: int) -> Iterator[tuple[Sequence[StepCost], Sequence[DrawnRun]]]:
        if self._bootstrap.is_certain:
            yield self._bootstrap.expected()
            return
        draws = max(LEAST_DRAWS, min(MOST_DRAWS, DRAWN_RUNS // max(1, len(self._workload.runs))))
        for _ in range(min(most, draws)):
            yield self._bootstrap.draw()

    def permit_wait_fraction(self) -> float:
        """Return the fraction of a step's time spent waiting, with all workers on the first runs."""
        if self._queue is None:
            return 0.0
        costs, jobs = self._bootstrap.expected()
        active = jobs[: self._workload.launching.workers]
        counts = tuple(sum(job.condition == c for job in active) for c in range(len(costs)))
        wait_s = self._queue.wait_s(costs, counts)
        crowd = self._workload.full_crowding
        calling = [crowd * costs[job.condition].seconds for job in active if costs[job.condition].permit_s]
        return wait_s / (wait_s + sum(calling) / len(calling)) if calling else 0.0

    def _makespan_s(self, costs: Sequence[StepCost], jobs: Sequence[DrawnRun]) -> float:
        """Simulate one campaign: with a queue for permits step by step, else in seconds."""
        how, queue, started = self._workload.launching, self._queue, self._started
        is_orderly = queue is None and not how.stagger_s and started <= how.workers
        if is_orderly and all(len(job.attempts) == 1 for job in jobs):
            outside_s = [how.closing_s] * started + [how.startup_s + how.closing_s] * (len(jobs) - started)
            steps_s = (job.attempts[0] * costs[job.condition].seconds for job in jobs)
            return packed_s([*map(add, outside_s, steps_s)], how)
        runs = [self._phases(job, costs, is_started=i < started) for i, job in enumerate(jobs)]
        if queue is None:
            return makespan_s(runs, how, lambda counts: (how.crowding.of(counts[0]),), 1, started)
        wait_among = cache(partial(queue.wait_s, costs))  # the same runs are active again and again

        def pace(counts: Sequence[int]) -> Sequence[float]:
            wait_s, times = wait_among(tuple(counts[:-1])), how.crowding.of(sum(counts))
            return [*(times * cost.seconds + (wait_s if cost.permit_s else 0.0) for cost in costs), times]

        return makespan_s(runs, how, pace, len(costs) + 1, started)

    def _work_s(self, costs: Sequence[StepCost], jobs: Sequence[DrawnRun]) -> float:
        """Return how long one campaign's attempts take one after the other, without waits."""
        how, starts = self._workload.launching, sum(len(job.attempts) for job in jobs) - self._started
        steps_s = math.fsum(sum(job.attempts) * costs[job.condition].seconds for job in jobs)
        return steps_s + starts * how.startup_s + len(jobs) * how.closing_s

    def _phases(self, job: DrawnRun, costs: Sequence[StepCost], *, is_started: bool) -> list[list[PhaseWork]]:
        """Return a run's attempts: each starts, takes steps and, if it is the last one, closes."""
        how, last, own = self._workload.launching, len(job.attempts) - 1, costs[job.condition].seconds
        attempts: list[list[PhaseWork]] = []
        for attempt, steps in enumerate(job.attempts):
            before_s = 0.0 if is_started and attempt == 0 else how.startup_s
            after_s = how.closing_s if attempt == last else 0.0
            if self._queue is None:
                attempts.append([(0, before_s + steps * own + after_s)])
            else:
                attempts.append([(len(costs), before_s), (job.condition, steps), (len(costs), after_s)])
        return attempts

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


def packed_s(works_s: Sequence[float], how: Launching) -> float:
    """Return when the last run ends, of runs that never fail and start in order on the next free worker.

    `works_s` is what each takes alone. Until the last one starts, all workers keep one pace: only ends count.
    """
    ends = list(works_s[: how.workers])  # of the runs alive, in seconds of work alone
    heapq.heapify(ends)
    done_s = 0.0
    for work_s in works_s[how.workers :]:
        done_s = ends[0]
        heapq.heapreplace(ends, done_s + work_s)
    now_s = how.crowding.of(len(ends)) * done_s
    for ended, end_s in enumerate(sorted(ends)):
        now_s += how.crowding.of(len(ends) - ended) * (end_s - done_s)
        done_s = end_s
    return now_s


def makespan_s(
    runs: Sequence[Sequence[Sequence[PhaseWork]]], how: Launching, pace: PaceOf, paces: int, started: int = 0
) -> float:
    """Return the time at which the last run ends.

    Args:
        runs: each run's attempts, as phases, in launch order; all attempts but the last one fail.
        how: workers, stagger and the delay of a retry; a due retry is launched first.
        pace: seconds per unit of work at each pace, by how many runs are in such a phase.
        paces: how many there are.
        started: number of first runs that are already running.
    """
    done = [0.0] * paces  # work done so far by each run of a pace
    ends: Ends = [[] for _ in done]
    counts = [0] * paces
    launches, now = _Launches(runs, how, started), 0.0

    def begin(run: int, attempt: int, phase: int = 0) -> None:
        group, work = runs[run][attempt][phase]
        counts[group] += 1
        heapq.heappush(ends[group], (done[group] + work, run, attempt, phase))

    for run in range(started):
        begin(run, 0)
    while launches.go_on:
        times = pace(counts)
        end, ending = _next_end(now, times, done, ends)
        launch = launches.next_s(now)
        since, now = now, min(end, launch)
        for group, time_s in enumerate(times):
            done[group] += (now - since) / (time_s or math.inf)
        if end > launch:
            begin(*launches.take(now))
            continue
        done[ending], run, attempt, phase = heapq.heappop(ends[ending])
        counts[ending] -= 1
        if phase + 1 < len(runs[run][attempt]):
            begin(run, attempt, phase + 1)
        else:
            launches.ended(now, run, attempt)
    return now


class _Launches:
    """Which run is launched next, and when."""

    def __init__(self, runs: Sequence[Sequence[object]], how: Launching, started: int) -> None:
        self._runs, self._how = runs, how
        self._waiting = self._busy = started  # the first run that waits; how many are running
        self._retries: list[tuple[float, int, int]] = []  # when due, run, attempt
        self._next_s = 0.0

    @property
    def go_on(self) -> bool:
        """Whether any run is not at its end."""
        return bool(self._busy or self._retries or self._waiting < len(self._runs))

    def next_s(self, now: float) -> float:
        """Return when the next run is launched if none ends before; infinite if none can be."""
        if self._busy >= self._how.workers:
            return math.inf
        ready = now if self._waiting < len(self._runs) else self._due_s
        return max(now, self._next_s, ready)

    @property
    def _due_s(self) -> float:
        return self._retries[0][0] if self._retries else math.inf

    def take(self, now: float) -> tuple[int, int]:
        """Launch a run; return its number and that of its attempt."""
        run, attempt = heapq.heappop(self._retries)[1:] if self._due_s <= now else (self._waiting, 0)
        if attempt == 0:
            self._waiting += 1
        self._busy += 1
        self._next_s = now + self._how.stagger_s
        return run, attempt

    def ended(self, now: float, run: int, attempt: int) -> None:
        self._busy -= 1
        if attempt + 1 < len(self._runs[run]):
            heapq.heappush(self._retries, (now + self._how.failures.delay_s, run, attempt + 1))


def _next_end(now: float, times: Sequence[float], done: Sequence[float], ends: Ends) -> tuple[float, int]:
    """Return when the next phase ends, and at which pace it is."""
    at = ((now + (heap[0][0] - done[i]) * times[i], i) for i, heap in enumerate(ends) if heap)
    return min(at, default=(math.inf, 0))


def ninth_decile(values: Sequence[float]) -> float:
    """Return the P90 of some values, linear between neighbours."""
    return statistics.quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


def widened(p50_s: float, p90_s: float, deviation: float) -> float:
    """Return P90 with a further relative standard deviation, independent of what it holds already."""
    if p50_s <= 0:
        return p90_s
    return p50_s * math.exp(math.hypot(math.log(p90_s / p50_s), NORMAL_P90 * deviation))


def _guessed_ratios() -> list[float]:
    width = STEP_CV_GUESSED * math.sqrt(3)  # half-width of the uniform distribution with this deviation
    return [1 + width * (2 * (i + 0.5) / GUESSED_RATIOS - 1) for i in range(GUESSED_RATIOS)]
