"""A few thousand steps of runs that never end and share permits, event by event: a step's mean wait."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Sequence

from retrain.plan.estimate.workload import StepCost

WARM_UP = 4  # steps of each run until the order of calls has settled
LEAST_STEPS = 2500  # measured: the mean wait is then known to about 1 %
STEPS_PER_RUN = 8


class ClosedQueue:
    """A step is some time of its own, then calls that each take a permit, first come first served."""

    def __init__(
        self, costs: Sequence[StepCost], permits: int, ratios: Sequence[float], rng: random.Random
    ) -> None:
        """Begin a step of each run.

        Args:
            costs: one for each run.
            permits: calls in flight.
            ratios: step times over their mean.
            rng: draws from them.
        """
        self._costs = costs
        self._ratios = ratios
        self._rng = rng
        self._free = permits
        self._at_once = [min(c.calls_at_once, permits) if c.permit_s else 0 for c in costs]
        self._begun = [0.0] * len(costs)
        self._alone = [0.0] * len(costs)  # seconds of the present step without a wait
        self._call = [0.0] * len(costs)  # of which in calls
        self._open = [0] * len(costs)  # calls that have not ended
        self._queue: deque[int] = deque()
        self._ordinal = itertools.count()  # breaks ties, so that equal times are served in order
        self._events: list[tuple[float, int, int, bool]] = []  # when, tie, run, does a call end
        for run in range(len(costs)):
            self._begin(run, 0.0)

    def mean_wait_s(self) -> float:
        """Simulate, and give the mean wait of a step that makes calls."""
        runs = len(self._costs)
        for _ in range(WARM_UP * runs):
            self._next_step()
        steps = [self._next_step() for _ in range(max(LEAST_STEPS, STEPS_PER_RUN * runs))]
        waits = [wait_s for run, wait_s in steps if self._at_once[run]]
        return sum(waits) / max(1, len(waits))

    def _next_step(self) -> tuple[int, float]:
        """Go on until a step ends; give its run and how long it waited."""
        while True:
            now, _, run, is_end = heapq.heappop(self._events)
            if is_end:
                self._free += 1
                self._open[run] -= 1
            else:
                self._open[run] = self._at_once[run]
                self._queue.extend([run] * self._at_once[run])
            self._serve(now)
            if self._open[run] == 0:
                waited_s = now - self._begun[run] - self._alone[run]
                self._begin(run, now)
                return run, waited_s

    def _serve(self, now: float) -> None:
        while self._free and self._queue:
            self._free -= 1
            run = self._queue.popleft()
            heapq.heappush(self._events, (now + self._call[run], next(self._ordinal), run, True))

    def _begin(self, run: int, now: float) -> None:
        cost, ratio = self._costs[run], self._rng.choice(self._ratios)
        self._begun[run], self._alone[run] = now, ratio * cost.seconds
        calls_s = ratio * cost.permit_s / max(1, self._at_once[run])
        self._call[run] = min(calls_s, self._alone[run])
        at = now + self._alone[run] - self._call[run]
        heapq.heappush(self._events, (at, next(self._ordinal), run, False))
