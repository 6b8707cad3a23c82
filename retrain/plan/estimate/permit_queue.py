"""How long a step waits for permits, by the number of active runs.

Runs are customers of a closed queue: a step is some time without calls, then calls that each need one
permit, first come first served. The wait has two parts:

- capacity: all calls together cannot hold more than all permits. If every step waits equally long, the
  shortest possible wait is the root of sum(n_c P_c / (t_c + W)) = permits; exact when step times do
  not vary (the asymptotes of operational analysis, Denning and Buzen 1978, doi:10.1145/356733.356735).
- the knee: where demand is close to the number of permits, varying step times add to the wait.
  The excess is measured once per campaign by short simulations of the queue, and interpolated.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from retrain.plan.estimate.workload import Crowding, StepCost

LOADS = (0.6, 0.8, 0.92, 1.0, 1.1, 1.3, 1.7)  # demand over permits at which the knee is measured
SATURATED = 2.5  # demand over permits from which no permit is ever free: capacity alone decides


class PermitQueue:
    """Waits for permits, by how many runs of each condition are taking steps."""

    def __init__(
        self,
        costs: Sequence[StepCost],
        permits: int,
        order: Sequence[int],
        most_active: int,
        ratios: Sequence[float],
        rng: random.Random,
        crowding: Crowding,
    ) -> None:
        """Measure the knee of runs that start in the `order` of their conditions, `most_active` at most.

        `ratios` are step times over their mean, drawn by `rng`.
        """
        self._crowding = crowding
        self._permits = permits
        self._asks = [cost.calls_at_once if cost.permit_s else 0 for cost in costs]
        self.can_wait = most_active * max(self._asks) > permits
        shares = [cost.permit_s / cost.seconds if cost.permit_s else 0.0 for cost in costs]
        # the load of so many runs, and how much more than by capacity they wait, as a fraction of a calling
        # run's step with its capacity wait
        self.knee: list[tuple[float, float]] = []
        calls, load, members = 0, 0.0, list[int]()
        for active in range(1, most_active + 1):
            members.append(order[(active - 1) % len(order)])
            calls += self._asks[members[-1]]
            before, load = load, load + shares[members[-1]] / permits
            is_near = any(before < mark <= load for mark in LOADS)
            is_last = active == most_active
            if calls > permits and load < SATURATED and (not self.knee or is_near or is_last):
                counts = tuple(members.count(c) for c in range(len(costs)))
                crowded = self._crowded(costs, active)
                simulated_s = ClosedQueue([crowded[c] for c in members], permits, ratios, rng).mean_wait_s()
                calling_s = statistics.fmean(crowded[c].seconds for c in members if self._asks[c])
                least_s = _capacity_wait_s(crowded, counts, permits)
                excess = (simulated_s - least_s) / (calling_s + least_s)
                self.knee.append((_load(crowded, counts, permits), excess))

    def _crowded(self, costs: Sequence[StepCost], active: int) -> Sequence[StepCost]:
        """Return the step costs with `active` runs alive."""
        times = self._crowding.of(active)
        if times == 1.0:
            return costs
        return [replace(c, seconds=times * c.seconds, permit_s=times * c.permit_s) for c in costs]

    def wait_s(self, costs: Sequence[StepCost], counts: tuple[int, ...]) -> float:
        """Return the mean wait of one step, the same for all conditions that make calls."""
        if sum(n * asks for n, asks in zip(counts, self._asks, strict=True)) <= self._permits:
            return 0.0
        costs = self._crowded(costs, sum(counts))
        least = _capacity_wait_s(costs, counts, self._permits)
        calling = [(n, cost.seconds) for n, cost in zip(counts, costs, strict=True) if n and cost.permit_s]
        mean = sum(n * seconds for n, seconds in calling) / sum(n for n, _ in calling)
        excess = _interpolate(self.knee, _load(costs, counts, self._permits))
        return max(0.0, least + excess * (mean + least))


def _capacity_wait_s(costs: Sequence[StepCost], counts: Sequence[int], permits: int) -> float:
    """Solve sum(n P / (t + W)) = permits for W by Newton's method, from below on a convex curve."""
    calling = [(n * c.permit_s, c.seconds) for n, c in zip(counts, costs, strict=True) if n and c.permit_s]
    wait_s = 0.0
    for _ in range(50):
        excess = slope = 0.0
        for held, seconds in calling:
            rate = held / (seconds + wait_s)
            excess += rate
            slope += rate / (seconds + wait_s)
        excess -= permits
        if excess <= 1e-9 * permits:
            break
        wait_s += excess / slope
    return wait_s


def _load(costs: Sequence[StepCost], counts: Sequence[int], permits: int) -> float:
    held = [n * c.permit_s / c.seconds for n, c in zip(counts, costs, strict=True) if n and c.seconds]
    return sum(held) / permits


def _interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    if not points:  # saturated by the first run already
        return 0.0
    if x <= points[0][0]:
        return points[0][1] * max(0.0, x / points[0][0])
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1
    return 0.0 if x > SATURATED else points[-1][1]


WARM_UP = 4  # steps of each run until the order of calls has settled
LEAST_STEPS = 2500  # measured: the mean wait is then known to about 1 %
STEPS_PER_RUN = 8


class ClosedQueue:
    """Simulates steps: time without calls, then calls that each take a permit, first come first served."""

    def __init__(
        self, costs: Sequence[StepCost], permits: int, ratios: Sequence[float], rng: random.Random
    ) -> None:
        """Begin a step of each run: `costs` are per run, `ratios` its step times over their mean."""
        self._costs = costs
        self._ratios = ratios
        self._rng = rng
        self._free = permits
        self._at_once = [c.calls_at_once if c.permit_s else 0 for c in costs]
        self._begun = [0.0] * len(costs)
        self._alone = [0.0] * len(costs)  # seconds of the current step without waits
        self._call = [0.0] * len(costs)  # seconds of each of its calls
        self._open = [0] * len(costs)  # calls that have not ended
        self._queue: deque[int] = deque()
        self._ordinal = itertools.count()  # breaks ties, so that equal times are served in order
        self._events: list[tuple[float, int, int, bool]] = []  # time, tie-break, run, whether a call ends
        for run in range(len(costs)):
            self._begin(run, 0.0)

    def mean_wait_s(self) -> float:
        """Simulate, and return the mean wait of a step that makes calls."""
        runs = len(self._costs)
        for _ in range(WARM_UP * runs):
            self._next_step()
        steps = [self._next_step() for _ in range(max(LEAST_STEPS, STEPS_PER_RUN * runs))]
        waits = [wait_s for run, wait_s in steps if self._at_once[run]]
        return sum(waits) / max(1, len(waits))

    def _next_step(self) -> tuple[int, float]:
        """Simulate until a step ends; return its run and how long it waited."""
        while True:
            now_s, _, run, is_end = heapq.heappop(self._events)
            if is_end:
                self._free += 1
                self._open[run] -= 1
            else:
                self._open[run] = self._at_once[run]
                self._queue.extend([run] * self._at_once[run])
            self._serve(now_s)
            if self._open[run] == 0:
                waited_s = now_s - self._begun[run] - self._alone[run]
                self._begin(run, now_s)
                return run, waited_s

    def _serve(self, now_s: float) -> None:
        while self._free and self._queue:
            self._free -= 1
            run = self._queue.popleft()
            heapq.heappush(self._events, (now_s + self._call[run], next(self._ordinal), run, True))

    def _begin(self, run: int, now_s: float) -> None:
        cost, ratio = self._costs[run], self._rng.choice(self._ratios)
        self._begun[run], self._alone[run] = now_s, ratio * cost.seconds
        calls_s = ratio * cost.permit_s / max(1, self._at_once[run])
        self._call[run] = min(calls_s, self._alone[run])
        at = now_s + self._alone[run] - self._call[run]
        heapq.heappush(self._events, (at, next(self._ordinal), run, False))
