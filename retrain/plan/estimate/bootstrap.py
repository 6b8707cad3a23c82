"""Draw campaigns that are consistent with a pilot: the cost of each condition, and the length of each run.

There are two levels. A condition's mean step time is known only from the few steps of its pilot, so it is
resampled, from the step times of all conditions as ratios to their own mean: conditions share the shape of
the distribution. Then each run's own steps are drawn from the same pool; a sum of many is drawn at once,
from the gamma distribution with the sum's mean and variance. Variance between runs that their steps do not
explain (a slower machine, a busier hour) is drawn as well.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

from retrain.plan.estimate.workload import Pilot, StepCost, Workload

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


def _deviations(times: Sequence[float]) -> list[float]:
    """Return how far off times are, relative to their mean."""
    mean = math.fsum(times) / len(times)
    return [time / mean - 1 if mean else 0.0 for time in times]


def spread_of(pilot: Pilot | None) -> Spread:
    """Pool a pilot's step times as ratios to their condition's mean."""
    if pilot is None or not pilot.steps:
        return Spread((), {}, 0.0, 1.0, {}, {}, 0.0)
    measured = {c: list(times) for c, times in pilot.step_times_s.items() if len(times)}
    deviations = {c: _deviations(times) for c, times in measured.items()}
    total = sum(map(len, measured.values()))
    widen = math.sqrt(total / max(1, total - len(measured)))  # each mean was fitted to its own times
    ratios = tuple(max(0.0, 1 + widen * deviation) for row in deviations.values() for deviation in row)
    variance = math.fsum((ratio - 1) ** 2 for ratio in ratios) / len(ratios)
    counts = {c: len(times) for c, times in measured.items()} | dict(pilot.behind)
    persistence = _persistence([row for c, row in deviations.items() if any(measured[c])])
    return Spread(ratios, counts, variance, persistence, pilot.runs, pilot.same_runs, pilot.run_variance)


class Bootstrap:
    """Draws possible campaigns of one workload."""

    def __init__(self, workload: Workload, pilot: Pilot | None, rng: random.Random) -> None:
        self._workload = workload
        self._rng = rng
        self.spread = spread_of(pilot)
        self._few = min(FEW_DRAWS, MOST_CHOICES / max(1, len(workload.runs)))
        self._places = {condition: place for place, condition in enumerate(workload.costs)}

    @property
    def is_certain(self) -> bool:
        """Whether every draw is the same."""
        spread, failures = self.spread, self._workload.launching.failures
        return not (spread.variance or spread.run_variance or failures.per_hour)

    def expected(self) -> tuple[list[StepCost], list[DrawnRun]]:
        """Return the campaign of means, without failures."""
        runs = [DrawnRun(self._places[run.condition], (run.steps,)) for run in self._workload.runs]
        return list(self._workload.costs.values()), runs

    def draw(self) -> tuple[list[StepCost], list[DrawnRun]]:
        """Return one possible campaign: costs by condition, runs in launch order."""
        errors: dict[str, float] = {}  # of the pilot's means: one for all conditions with the same runs
        drawn: dict[tuple[str, StepCost], StepCost] = {}
        costs = []
        for condition, cost in self._workload.costs.items():
            first = self.spread.same_runs.get(condition, condition)
            if first not in errors:
                errors[first] = self._error(first)
            if (first, cost) not in drawn:  # the pilot's mean is the true mean times such a ratio: divide
                seconds, permit_s = cost.seconds / errors[first], cost.permit_s / errors[first]
                drawn[first, cost] = replace(cost, seconds=seconds, permit_s=permit_s)
            costs.append(drawn[first, cost])
        ratio_of = {steps: self._mean_ratio(steps, 1) for steps in {run.steps for run in self._workload.runs}}
        lengths = [(self._places[run.condition], run.steps) for run in self._workload.runs]
        if self._workload.launching.failures.per_hour == 0:
            return costs, [DrawnRun(place, (steps * ratio_of[steps](),)) for place, steps in lengths]
        return costs, [
            DrawnRun(place, self._attempts(steps * ratio_of[steps](), costs[place]))
            for place, steps in lengths
        ]

    def _error(self, condition: str) -> float:
        """Draw the ratio of the pilot's mean of a condition to the true one."""
        known = self.spread.counts or {condition: 0}
        count = known.get(condition, 0)
        if not count and self.spread.counts:
            # not measured itself: as uncertain as a measured condition, drawn at random
            count = self._rng.choice(sorted(known.values()))
        ratio_of = self._mean_ratio(count, self.spread.runs.get(condition, 1))
        return max(ratio_of(), LEAST_RATIO)

    def _mean_ratio(self, count: float, runs: int) -> Callable[[], float]:
        """Return what draws the mean of so many steps of so many runs, over what is expected of it."""
        spread, between_runs = self.spread, self.spread.run_variance / max(1, runs)
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

    def _attempts(self, steps: float, cost: StepCost) -> tuple[float, ...]:
        failures = self._workload.launching.failures
        per_step = failures.per_hour / 3600 * self._workload.full_crowding * cost.seconds
        attempts: list[float] = []
        while per_step and len(attempts) < failures.retries:
            until = self._rng.expovariate(per_step)
            if until >= steps:
                break
            attempts.append(until)
            steps -= max(0.0, until - self._rng.random() * failures.lost_steps)
        return (*attempts, steps)


def _persistence(rows: Sequence[Sequence[float]]) -> float:
    """Estimate how much slow steps cluster, from the correlation of neighbours; 1 if they do not."""
    pairs = [(a, b) for row in rows for a, b in itertools.pairwise(row)]
    if len(pairs) < 2:
        return 1.0
    square = math.fsum(a * a for row in rows for a in row) / sum(map(len, rows))
    correlation = math.fsum(a * b for a, b in pairs) / len(pairs) / square if square else 0.0
    certain = correlation - 2 / math.sqrt(len(pairs))  # exceeds what chance alone gives
    return (1 + correlation) / (1 - correlation) if certain > 0 and correlation < 1 else 1.0
