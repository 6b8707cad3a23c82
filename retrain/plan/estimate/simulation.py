"""Draws possible campaigns of one workload, or the rest of one, and simulates each until its last run ends.

Between two events (a launch, the end of a phase) the same runs are alive, so each works at a constant
pace. Only events are simulated, a few per run.

Campaigns are drawn consistent with a pilot, on two levels. A condition's mean step time is known only from
the few steps of its pilot, so it is resampled, from the step times of all conditions as ratios to their own
mean: conditions share the shape of the distribution. Then each run's own steps are drawn from the same pool;
a sum of many is drawn at once, from the gamma distribution with the sum's mean and variance. Variance between
runs that their steps do not explain (a slower machine, a busier hour) is drawn as well.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import add
from typing import Literal, NamedTuple, TypeAlias

from retrain.plan.estimate.permit_queue import PermitQueue
from retrain.plan.estimate.workload import NORMAL_P90, Launching, Pilot, StepCost, Workload

Tail = Literal["none", "light", "heavy", "short"]

FEW_DRAWS = 64  # up to this many ratios are drawn one by one; more are drawn as one gamma variate
MOST_CHOICES = 32_000  # ratios drawn one by one for all runs of a campaign; a sum hides their shape anyway
NEARLY_NORMAL = 0.05  # variance below which an approximation of the gamma distribution is exact enough
TELLING_STEPS = 100  # a shorter pilot may not have seen what happens once in 33 steps
LEAST_RATIO = 0.1  # lower bound: a pilot's mean is further off only by a few heavy steps
HEAVY_RATIO = 4.0  # step time over the mean that a light tail of some hundred steps does not reach
FAR_RATIO = 1.5
HEAVY_PULL = 0.01  # change of the mean, as a fraction, by one more such step
HEAVY_SHARE = 0.5  # of all squared deviations in the largest one: that step dominates the variance
MOST_DRAWS = 200  # the P90 is then off by a tenth of the spread
LEAST_DRAWS = 24
DRAWN_RUNS = 24_000  # runs simulated over all draws: takes well under a second
STEP_CV_GUESSED = 0.1  # coefficient of variation of step times, if nothing was measured
GUESSED_RATIOS = 32

PhaseWork: TypeAlias = tuple[int, float]  # a pace's index, and the work to do at that pace
Ends: TypeAlias = list[list[tuple[float, int, int, int]]]  # heaps: `done` at the end, run, attempt, phase
PaceOf: TypeAlias = Callable[[Sequence[int]], Sequence[float]]  # runs in a phase of each pace -> s per work


class DrawnRun(NamedTuple):
    """One run: the steps of its attempts, all but the last of which fail."""

    condition: int
    attempts: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """How steps vary: ratios to their condition's mean, pooled."""

    ratios: tuple[float, ...]
    counts: Mapping[str, int]  # steps behind each condition's mean
    variance: float  # of one ratio
    persistence: float  # variance of a long sum over that of independent steps; at least 1
    runs: Mapping[str, int]  # runs behind each condition's mean
    same_runs: Mapping[str, str]  # of conditions with the same runs: the first of them
    run_variance: float

    @property
    def tail(self) -> Tail:
        """Classify the tail of the step times by what the pilot shows."""
        if not self.ratios:
            return "none"
        deviations = [(ratio - 1) ** 2 for ratio in self.ratios]
        largest = max(self.ratios)
        is_far = largest > HEAVY_RATIO or (
            largest > FAR_RATIO and (largest - 1) ** 2 > HEAVY_SHARE * sum(deviations)
        )
        if is_far and largest > HEAVY_PULL * len(self.ratios):
            return "heavy"
        return "light" if len(self.ratios) >= TELLING_STEPS else "short"


def spread_of(pilot: Pilot | None) -> Spread:
    """Pool a pilot's step times as ratios to their condition's mean."""
    if pilot is None or not pilot.steps:
        return Spread((), {}, 0.0, 1.0, {}, {}, 0.0)
    measured = {c: list(times) for c, times in pilot.step_times_s.items() if len(times)}
    means = {c: statistics.fmean(times) for c, times in measured.items()}
    deviations = {
        c: [time / means[c] - 1 if means[c] else 0.0 for time in times] for c, times in measured.items()
    }
    total = sum(map(len, measured.values()))
    widen = math.sqrt(total / max(1, total - len(measured)))  # each mean was fitted to its own times
    ratios = tuple(max(0.0, 1 + widen * deviation) for row in deviations.values() for deviation in row)
    variance = math.fsum((ratio - 1) ** 2 for ratio in ratios) / len(ratios)
    counts = {c: len(times) for c, times in measured.items()} | dict(pilot.behind)
    persistence = _persistence([row for c, row in deviations.items() if any(measured[c])])
    return Spread(ratios, counts, variance, persistence, pilot.runs, pilot.same_runs, pilot.run_variance)


def _persistence(rows: Sequence[Sequence[float]]) -> float:
    """Estimate how much slow steps cluster, from the correlation of neighbours; 1 if they do not."""
    pairs = [(a, b) for row in rows for a, b in itertools.pairwise(row)]
    if len(pairs) < 2:
        return 1.0
    square = math.fsum(a * a for row in rows for a in row) / sum(map(len, rows))
    correlation = math.fsum(a * b for a, b in pairs) / len(pairs) / square if square else 0.0
    certain = correlation - 2 / math.sqrt(len(pairs))  # exceeds what chance alone gives
    return (1 + correlation) / (1 - correlation) if certain > 0 and correlation < 1 else 1.0


class Simulation:
    """Possible campaigns of one workload, and how long each takes."""

    def __init__(self, workload: Workload, pilot: Pilot | None, seed: int) -> None:
        self._workload = workload
        self._rng = random.Random(seed)
        self._spread = spread_of(pilot)
        self._few = min(FEW_DRAWS, MOST_CHOICES / max(1, len(workload.runs)))
        self._places = {condition: place for place, condition in enumerate(workload.costs)}
        self._started = sum(run.is_started for run in workload.runs)
        self._queue: PermitQueue | None = None
        how, (costs, jobs) = workload.launching, self._expected()
        if how.permits is not None and any(cost.permit_s for cost in costs):
            width = STEP_CV_GUESSED * math.sqrt(3)  # half-width of the uniform distribution
            guesses = [1 + width * (2 * (i + 0.5) / GUESSED_RATIOS - 1) for i in range(GUESSED_RATIOS)]
            ratios, order = self._spread.ratios or guesses, [job.condition for job in jobs]
            most = min(how.workers, len(jobs))
            queue = PermitQueue(costs, how.permits, order, most, ratios, self._rng, how.crowding)
            self._queue = queue if queue.can_wait else None
        self.tail: Tail = self._spread.tail

    def expected_s(self) -> float:
        """Return the makespan of the campaign of means."""
        return self._makespan_s(*self._expected())

    def sample(self, most: int = MOST_DRAWS) -> list[float]:
        """Return makespans of possible campaigns; a single one if all are equal."""
        return [self._makespan_s(*campaign) for campaign in self._campaigns(most)]

    def bounded(self) -> list[tuple[float, float]]:
        """Return makespans as `sample` does, each with its work over parallelism, which is no longer."""
        how = self._workload.launching
        places = range(1, min(how.workers, len(self._workload.runs)) + 1)
        pace = max((alive / how.crowding.of(alive) for alive in places), default=1.0)
        bounded = []
        for costs, jobs in self._campaigns(MOST_DRAWS):
            starts = sum(len(job.attempts) for job in jobs) - self._started
            work_s = math.fsum(sum(job.attempts) * costs[job.condition].seconds for job in jobs)
            work_s += starts * how.startup_s + len(jobs) * how.closing_s  # one after the other, without waits
            bounded.append((self._makespan_s(costs, jobs), work_s / pace))
        return bounded

    def _campaigns(self, most: int) -> Iterator[tuple[Sequence[StepCost], Sequence[DrawnRun]]]:
        spread, failures = self._spread, self._workload.launching.failures
        if not (spread.variance or spread.run_variance or failures.per_hour):  # every draw is the same
            yield self._expected()
            return
        draws = max(LEAST_DRAWS, min(MOST_DRAWS, DRAWN_RUNS // max(1, len(self._workload.runs))))
        for _ in range(min(most, draws)):
            yield self._draw()

    def permit_wait_fraction(self) -> float:
        """Return the fraction of a step's time spent waiting, with all workers on the first runs."""
        if self._queue is None:
            return 0.0
        costs, jobs = self._expected()
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
        runs: list[list[list[PhaseWork]]] = []  # attempts, each of which starts, takes steps and closes
        for number, job in enumerate(jobs):
            attempts, step_s = list[list[PhaseWork]](), costs[job.condition].seconds
            for attempt, steps in enumerate(job.attempts):
                before_s = 0.0 if number < started and attempt == 0 else how.startup_s
                after_s = how.closing_s if attempt == len(job.attempts) - 1 else 0.0
                phases = [(len(costs), before_s), (job.condition, steps), (len(costs), after_s)]
                attempts.append(phases if queue is not None else [(0, before_s + steps * step_s + after_s)])
            runs.append(attempts)
        if queue is None:
            return makespan_s(runs, how, lambda counts: (how.crowding.of(counts[0]),), 1, started)
        wait_among = cache(partial(queue.wait_s, costs))  # the same runs are active again and again

        def pace(counts: Sequence[int]) -> Sequence[float]:
            wait_s, times = wait_among(tuple(counts[:-1])), how.crowding.of(sum(counts))
            return [*(times * cost.seconds + (wait_s if cost.permit_s else 0.0) for cost in costs), times]

        return makespan_s(runs, how, pace, len(costs) + 1, started)

    def _expected(self) -> tuple[list[StepCost], list[DrawnRun]]:
        """Return the campaign of means, without failures."""
        runs = [DrawnRun(self._places[run.condition], (run.steps,)) for run in self._workload.runs]
        return list(self._workload.costs.values()), runs

    def _draw(self) -> tuple[list[StepCost], list[DrawnRun]]:
        """Return one possible campaign: costs by condition, runs in launch order."""
        errors: dict[str, float] = {}  # of the pilot's means: one for all conditions with the same runs
        drawn: dict[tuple[str, StepCost], StepCost] = {}
        costs = []
        for condition, cost in self._workload.costs.items():
            first = self._spread.same_runs.get(condition, condition)
            if first not in errors:
                errors[first] = self._error(first)
            if (first, cost) not in drawn:  # the pilot's mean is the true mean times such a ratio: divide
                seconds, permit_s = cost.seconds / errors[first], cost.permit_s / errors[first]
                drawn[first, cost] = replace(cost, seconds=seconds, permit_s=permit_s)
            costs.append(drawn[first, cost])
        ratio_of = {steps: self._mean_ratio(steps, 1) for steps in {run.steps for run in self._workload.runs}}
        lengths = [(self._places[run.condition], run.steps) for run in self._workload.runs]
        failures = self._workload.launching.failures
        if failures.per_hour == 0:
            return costs, [DrawnRun(place, (steps * ratio_of[steps](),)) for place, steps in lengths]
        per_s, runs = failures.per_hour / 3600 * self._workload.full_crowding, list[DrawnRun]()
        for place, steps in lengths:
            left, attempts = steps * ratio_of[steps](), list[float]()
            per_step = per_s * costs[place].seconds
            while per_step and len(attempts) < failures.retries:
                until = self._rng.expovariate(per_step)
                if until >= left:
                    break
                attempts.append(until)
                left -= max(0.0, until - self._rng.random() * failures.lost_steps)
            runs.append(DrawnRun(place, (*attempts, left)))
        return costs, runs

    def _error(self, condition: str) -> float:
        """Draw the ratio of the pilot's mean of a condition to the true one."""
        count = self._spread.counts.get(condition, 0)
        if not count and self._spread.counts:
            # not measured itself: as uncertain as a measured condition, drawn at random
            count = self._rng.choice(sorted(self._spread.counts.values()))
        ratio_of = self._mean_ratio(count, self._spread.runs.get(condition, 1))
        return max(ratio_of(), LEAST_RATIO)

    def _mean_ratio(self, count: float, runs: int) -> Callable[[], float]:
        """Return what draws the mean of so many steps of so many runs, over what is expected of it."""
        spread, between_runs = self._spread, self._spread.run_variance / max(1, runs)
        if count <= 0 or spread.variance == 0:
            return self._ratio(between_runs)
        if count > self._few or spread.persistence > 1:
            within_runs = spread.variance * spread.persistence / count
            return self._ratio(within_runs + between_runs + within_runs * between_runs)
        steps, ratio_of_run = max(1, round(count)), self._ratio(between_runs)
        return lambda: math.fsum(self._rng.choices(spread.ratios, k=steps)) / steps * ratio_of_run()

    def _ratio(self, variance: float) -> Callable[[], float]:
        """Return what draws from the gamma distribution with mean 1 and this variance."""
        if variance > NEARLY_NORMAL:
            return partial(self._rng.gammavariate, 1 / variance, variance)
        # Wilson and Hilferty (1931), within 0.1 % and a quarter of the time: 10,000 runs take 240,000 draws
        middle, width, gauss = 1 - variance / 9, math.sqrt(variance) / 3, self._rng.gauss
        return lambda: (middle + gauss(0.0, width)) ** 3


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
    waiting = busy = started  # the first run that waits; how many are running
    retries: list[tuple[float, int, int]] = []  # when due, run, attempt
    now_s = next_launch_s = 0.0

    def begin(run: int, attempt: int, phase: int = 0) -> None:
        group, work = runs[run][attempt][phase]
        counts[group] += 1
        heapq.heappush(ends[group], (done[group] + work, run, attempt, phase))

    for run in range(started):
        begin(run, 0)
    while busy or retries or waiting < len(runs):
        times = pace(counts)
        ends_s = [(now_s + (heap[0][0] - done[i]) * times[i], i) for i, heap in enumerate(ends) if heap]
        end_s, ending = min(ends_s, default=(math.inf, 0))
        due_s, launch_s = retries[0][0] if retries else math.inf, math.inf
        if busy < how.workers:
            launch_s = max(now_s, next_launch_s, now_s if waiting < len(runs) else due_s)
        since_s, now_s = now_s, min(end_s, launch_s)
        for group, time_s in enumerate(times):
            done[group] += (now_s - since_s) / (time_s or math.inf)
        if end_s > launch_s:
            run, attempt = heapq.heappop(retries)[1:] if due_s <= now_s else (waiting, 0)
            if attempt == 0:
                waiting += 1
            busy += 1
            next_launch_s = now_s + how.stagger_s
            begin(run, attempt)
            continue
        done[ending], run, attempt, phase = heapq.heappop(ends[ending])
        counts[ending] -= 1
        if phase + 1 < len(runs[run][attempt]):
            begin(run, attempt, phase + 1)
        else:
            busy -= 1
            if attempt + 1 < len(runs[run]):
                heapq.heappush(retries, (now_s + how.failures.delay_s, run, attempt + 1))
    return now_s


def ninth_decile(values: Sequence[float]) -> float:
    """Return the P90 of some values, linear between neighbours."""
    return statistics.quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


def widened(p50_s: float, p90_s: float, deviation: float) -> float:
    """Return P90 with a further relative standard deviation, independent of what it holds already."""
    if p50_s <= 0:
        return p90_s
    return p50_s * math.exp(math.hypot(math.log(p90_s / p50_s), NORMAL_P90 * deviation))
