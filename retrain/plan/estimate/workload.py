"""The input of an estimate: runs, step costs, launching, and a pilot's step times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from retrain.plan.crowding import ALONE, Crowding

ALL = ""  # the only condition of runs without one


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
        if not all(math.isfinite(number) and number >= 0 for number in self._numbers()):
            raise ValueError("times, steps and rates must be finite and not negative")
        if any(cost.permit_s and not cost.seconds for cost in self.costs.values()):
            raise ValueError("a step that holds permits must take time")
        missing = {run.condition for run in self.runs} - self.costs.keys()
        if missing:
            raise ValueError(f"no cost is given for {', '.join(sorted(missing))}")

    def _numbers(self) -> Iterator[float]:
        how = self.launching
        yield from (how.stagger_s, how.startup_s, how.closing_s)
        yield from (how.failures.per_hour, how.failures.lost_steps, how.failures.delay_s)
        for cost in self.costs.values():
            yield from (cost.seconds, cost.permit_s)
        yield from (run.steps for run in self.runs)

    def run_seconds(self, run: RunWork) -> float:
        """Return a run's length without its start-up, if nothing delays it."""
        return run.steps * self.costs[run.condition].seconds


@dataclass(frozen=True, slots=True)
class Pilot:
    """Step times measured before: by condition, in seconds, free of waits for permits.

    `behind` is the number of steps behind a condition's mean, where that is more than the times given;
    `runs` is the number of runs. `run_variance` is the variance between runs that their steps do not explain:
    of a run's mean step time over its condition's.
    """

    step_times_s: Mapping[str, Sequence[float]]
    behind: Mapping[str, int] = field(default_factory=dict)
    runs: Mapping[str, int] = field(default_factory=dict)
    run_variance: float = 0.0

    @property
    def steps(self) -> int:
        """Steps measured, over all conditions."""
        return sum(len(times) for times in self.step_times_s.values())
