"""Simulates runs that share permits: the more runs are active, the slower each one's steps.

Between two events (a launch, a first step, a last step) the same runs are active, so each takes
its steps at a constant rate. Only events are simulated, a few per run.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from retrain.plan.estimate.permit_queue import PermitQueue
from retrain.plan.estimate.workload import Launching, StepCost

FIRST_STEP, PLACE_FREE = 0, 1


@dataclass(frozen=True, slots=True)
class Job:
    """One run: the steps of its attempts, all but the last of which fail."""

    condition: int
    attempts: tuple[float, ...]


class SharedCampaign:
    """One simulated campaign."""

    def __init__(
        self,
        jobs: Sequence[Job],
        costs: Sequence[StepCost],
        launching: Launching,
        queue: PermitQueue,
        started: int = 0,
    ) -> None:
        """Set up.

        Args:
            jobs: in launch order.
            costs: of each condition's steps.
            launching: workers, stagger and start-up.
            queue: how long steps wait.
            started: number of first jobs that are already taking steps.
        """
        self._jobs = jobs
        self._costs = costs
        self._how = launching
        self._queue = queue
        queue.forget()
        self._now = 0.0
        self._next_launch = 0.0
        self._waiting = started
        self._used = 0
        self._retries: list[tuple[float, int, int]] = []
        self._timers: list[tuple[float, int, int, int]] = []
        self._taken = [0.0] * len(costs)  # steps taken so far by each run of a condition
        self._ends: list[list[tuple[float, int, int]]] = [[] for _ in costs]  # by steps taken at the end
        self._step_s = [cost.seconds for cost in costs]
        for run in range(started):
            self._used += 1
            self._begin(run, 0)

    def makespan_s(self) -> float:
        """Return the time at which the last run ends."""
        last = 0.0
        while self._used or self._retries or self._waiting < len(self._jobs):
            self._look_at_waits()
            timer = self._timers[0][0] if self._timers else math.inf
            end, condition = self._next_end()
            launch = self._next_launch_at()
            self._advance(min(timer, end, launch))
            if launch <= min(timer, end):
                self._launch()
            elif timer <= end:
                last = max(last, self._ring())
            else:
                self._end_attempt(condition)
        return last

    def _look_at_waits(self) -> None:
        counts = tuple([len(ends) for ends in self._ends])
        wait_s, times = self._queue.wait_s(self._costs, counts), self._how.crowding.of(self._used)
        self._step_s = [times * cost.seconds + (wait_s if cost.permit_s else 0.0) for cost in self._costs]

    def _next_end(self) -> tuple[float, int]:
        first, condition = math.inf, -1
        for c, ends in enumerate(self._ends):
            if ends:
                at = self._now + max(0.0, ends[0][0] - self._taken[c]) * self._step_s[c]
                if at < first:
                    first, condition = at, c
        return first, condition

    def _next_launch_at(self) -> float:
        if self._used >= self._how.workers:
            return math.inf
        earliest = max(self._now, self._next_launch)
        if self._waiting < len(self._jobs):
            return earliest
        return max(earliest, self._retries[0][0]) if self._retries else math.inf

    def _advance(self, to: float) -> None:
        for c, step_s in enumerate(self._step_s):
            if self._ends[c] and step_s > 0:
                self._taken[c] += (to - self._now) / step_s
        self._now = to

    def _launch(self) -> None:
        if self._retries and (self._retries[0][0] <= self._now or self._waiting == len(self._jobs)):
            _, run, attempt = heapq.heappop(self._retries)
        else:
            run, attempt, self._waiting = self._waiting, 0, self._waiting + 1
        self._used += 1
        self._next_launch = self._now + self._how.stagger_s
        startup_s = self._how.crowding.of(self._used) * self._how.startup_s
        heapq.heappush(self._timers, (self._now + startup_s, FIRST_STEP, run, attempt))

    def _begin(self, run: int, attempt: int) -> None:
        job = self._jobs[run]
        ends = self._ends[job.condition]
        heapq.heappush(ends, (self._taken[job.condition] + job.attempts[attempt], run, attempt))

    def _end_attempt(self, condition: int) -> None:
        self._taken[condition], run, attempt = heapq.heappop(self._ends[condition])
        is_last = attempt + 1 == len(self._jobs[run].attempts)
        closing_s = self._how.crowding.of(self._used) * self._how.closing_s if is_last else 0.0
        heapq.heappush(self._timers, (self._now + closing_s, PLACE_FREE, run, attempt))

    def _ring(self) -> float:
        """Handle the next timer; return the time at which a run ended, or 0."""
        _, kind, run, attempt = heapq.heappop(self._timers)
        if kind == FIRST_STEP:
            self._begin(run, attempt)
            return 0.0
        self._used -= 1
        if attempt + 1 < len(self._jobs[run].attempts):
            due = self._now + self._how.failures.delay_s
            heapq.heappush(self._retries, (due, run, attempt + 1))
        return self._now
