"""The input of an estimate: runs, step costs, launching, a pilot's step times, and crowding.

Measured step times are converted to those of a run alone. A simulation then lengthens them by the number
of runs alive at each moment, so that a half-empty last wave runs faster than a full one.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

AliveSpan = tuple[float, float]  # seconds, runs alive
NORMAL_P90 = 1.2816  # standard deviations of a normal distribution above its median
DRIFT, CROWDED_DRIFT = 0.03, 0.07  # the latter on a machine that the runs keep busy


@dataclass(frozen=True, slots=True)
class Crowding:
    """Slowdown of a step relative to a run alone, by the number of runs alive.

    Raises:
        ValueError: there is no point, a number is not above 0, or the runs alive do not increase.
    """

    points: tuple[tuple[float, float], ...] = ((1.0, 1.0),)  # (runs alive, slowdown), linear between
    is_full: bool = False  # the last uses the whole machine, so that twice the runs double the slowdown

    def __post_init__(self) -> None:
        alive = [count for count, _ in self.points]
        if not alive or min(map(min, self.points)) <= 0 or alive != sorted(set(alive)):
            raise ValueError(f"points = {self.points} need slowdowns above 0, by ever more runs alive")

    @property
    def drift(self) -> float:
        """Deviation of the pace over a campaign, as a fraction, that all runs share: a guess from records."""
        return CROWDED_DRIFT if self.is_full else DRIFT

    def of(self, alive: float) -> float:
        """Return the slowdown of a step with `alive` runs alive."""
        if alive <= self.points[0][0]:
            return self.points[0][1]
        for (few, low), (many, high) in itertools.pairwise(self.points):
            if alive <= many:
                return low + (high - low) * (alive - few) / (many - few)
        many, high = self.points[-1]
        return high * alive / many if self.is_full else high

    def over(self, stretches: Sequence[AliveSpan]) -> float:
        """Return the mean slowdown of work over some stretches of time."""
        whole_s = math.fsum(seconds for seconds, _ in stretches)
        alone_s = math.fsum(seconds / self.of(alive) for seconds, alive in stretches)
        return whole_s / alone_s if alone_s > 0 else 1.0


ALONE = Crowding()


def on_cores(cores: float) -> Crowding:
    """Return the crowding of runs that each keep one core busy."""
    return Crowding(((max(1.0, cores), 1.0),), is_full=True)


class Alive:
    """How many runs of a campaign were alive at each time."""

    def __init__(self, spans: Iterable[tuple[float, float]], most: int = 0) -> None:
        """Count runs by their start and end in seconds; `most` is the campaign's limit, 0 if not known."""
        changes = sorted((at, step) for begin, end in spans for at, step in ((begin, 1), (end, -1)))
        counts = itertools.accumulate(step for _, step in changes)
        self._times = [at for at, _ in changes]
        self._counts = [min(count, most or count) for count in counts]  # from each time onwards

    @property
    def is_known(self) -> bool:
        return bool(self._times)

    def between(self, begin: float, end: float) -> tuple[AliveSpan, ...]:
        """Return the stretches of a run's life, each with the number of runs alive, itself included."""
        if end <= begin:
            return ()
        first, last = bisect.bisect_right(self._times, begin), bisect.bisect_left(self._times, end)
        edges = [begin, *self._times[first:last], end]
        counts = [max(1, self._counts[i]) if i >= 0 else 1 for i in range(first - 1, last)]
        stretches = zip(itertools.pairwise(edges), counts, strict=True)
        return tuple((until - since, alive) for (since, until), alive in stretches if until > since)


@dataclass(frozen=True, slots=True)
class RunWork:
    """One run's remaining work."""

    condition: str
    steps: float
    is_started: bool = False  # already running: no launch, no start-up


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one step of a condition takes when no other run is alive."""

    seconds: float  # the mean: a run's length is a sum
    permit_s: float = 0.0  # permit-seconds of its API calls; more than `seconds` if calls overlap
    calls_at_once: int = 1  # permits that a step asks for together


@dataclass(frozen=True, slots=True)
class Failures:
    """Infrastructure failures that are retried from a checkpoint."""

    per_hour: float = 0.0  # per run that is taking steps
    lost_steps: float = 0.0  # steps between two checkpoints; half of them are repeated on average
    delay_s: float = 1.0  # before the next attempt
    retries: int = 2  # a run that fails more often is not retried


@dataclass(frozen=True, slots=True)
class Launching:
    """How runs are launched, and what each costs in addition to its steps.

    Raises:
        ValueError: workers or permits are below 1.
    """

    workers: int
    stagger_s: float = 0.0  # least time between two launches
    startup_s: float = 0.0  # from a launch to the first step
    closing_s: float = 0.0  # from the last step until the worker is free
    permits: int | None = None  # API calls in flight over all runs; None if not limited
    failures: Failures = field(default_factory=Failures)
    crowding: Crowding = ALONE  # slowdown of all of this by concurrent runs

    def __post_init__(self) -> None:
        if self.workers < 1 or (self.permits is not None and self.permits < 1):
            raise ValueError(f"workers = {self.workers} and permits = {self.permits} must be at least 1")


@dataclass(frozen=True, slots=True)
class Workload:
    """A whole campaign, or the rest of one: runs in launch order, those already started first.

    Raises:
        ValueError: a time is negative or not finite, a condition has no cost, or its calls take
            time and its steps none.
    """

    runs: tuple[RunWork, ...]
    costs: Mapping[str, StepCost]  # by condition
    launching: Launching

    @property
    def full_crowding(self) -> float:
        """Slowdown of a step with all workers busy."""
        return self.launching.crowding.of(min(self.launching.workers, len(self.runs)))

    def __post_init__(self) -> None:
        how, failures = self.launching, self.launching.failures
        numbers = [how.stagger_s, how.startup_s, how.closing_s]
        numbers += [failures.per_hour, failures.lost_steps, failures.delay_s]
        numbers += [number for cost in self.costs.values() for number in (cost.seconds, cost.permit_s)]
        numbers += [run.steps for run in self.runs]
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise ValueError("times, steps and rates must be finite and not negative")
        if any(cost.permit_s and not cost.seconds for cost in self.costs.values()):
            raise ValueError("a step that holds permits must take time")
        missing = {run.condition for run in self.runs} - self.costs.keys()
        if missing:
            raise ValueError(f"no cost is given for {', '.join(sorted(missing))}")

    @property
    def waves(self) -> int:
        """How often all workers are given a run."""
        return math.ceil(len(self.runs) / self.launching.workers)

    @property
    def total_s(self) -> float:
        """Length of all runs together, without start-up and closing."""
        return math.fsum(map(self.run_seconds, self.runs))

    def run_seconds(self, run: RunWork) -> float:
        """Return a run's length without its start-up, if nothing delays it."""
        return run.steps * self.costs[run.condition].seconds


@dataclass(frozen=True, slots=True)
class Pilot:
    """Step times measured before, by condition, free of waits for permits."""

    step_times_s: Mapping[str, Sequence[float]]
    behind: Mapping[str, int] = field(default_factory=dict)  # steps behind the mean, if more than the times
    runs: Mapping[str, int] = field(default_factory=dict)
    same_runs: Mapping[str, str] = field(default_factory=dict)  # condition -> the first one with its runs
    run_variance: float = 0.0  # of a run's mean step time over its condition's, unexplained by its steps

    @property
    def steps(self) -> int:
        return sum(len(times) for times in self.step_times_s.values())


@dataclass(frozen=True, slots=True)
class RunVariance:
    """How much the mean steps of a condition's runs differ, beyond what their single steps explain."""

    variance: float  # over the squared mean; 0 while no condition has two runs
    freedom: int  # runs beyond the first of each condition: what it is measured from

    def expected(self, guess: float) -> float:
        """Return the variance to expect: a guessed deviation counts as much as one measured difference.

        This is the posterior scale of a normal variance, with an inverse chi-squared prior of one degree of
        freedom: two runs that happen to agree do not prove that all do.
        """
        return (guess**2 + self.freedom * self.variance) / (1 + self.freedom)


def run_variance(conditions: Iterable[Sequence[Sequence[float]]]) -> RunVariance:
    """Measure how much runs of a condition differ; `conditions` has the values of each run's steps."""
    squares, freedom, explained = 0.0, 0, 0.0
    for runs in conditions:
        means = list(map(statistics.fmean, runs))
        if len(means) < 2 or not (middle := statistics.fmean(means)):
            continue
        squares += math.fsum((mean / middle - 1) ** 2 for mean in means)
        freedom += len(means) - 1
        of_means = statistics.fmean(statistics.pvariance(steps) / len(steps) for steps in runs)
        explained += (len(means) - 1) * of_means / middle**2
    return RunVariance(max(0.0, squares - explained) / freedom if freedom else 0.0, freedom)
