"""A campaign simulated step by step: processes that sleep, take permits and wait for each other.

The reference for `benchmarks.estimator`. It shares no code with retrain.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

Process = Generator[tuple[str, float], None, None]


class Clock:
    """Runs generators that yield ("sleep", s), ("take", 0), ("give", 0) or ("park", 0); permits are FIFO."""

    def __init__(self, permits: int) -> None:
        self.now = 0.0
        self._free = permits
        self._queue: deque[Process] = deque()
        self._events: list[tuple[float, int, Process]] = []
        self._count = itertools.count()

    def spawn(self, process: Process, at: float | None = None) -> None:
        heapq.heappush(self._events, (self.now if at is None else at, next(self._count), process))

    def run(self) -> None:
        while self._events:
            self.now, _, process = heapq.heappop(self._events)
            self._go_on(process)

    def _go_on(self, process: Process) -> None:
        for what, seconds in process:
            if what == "sleep":
                self.spawn(process, self.now + seconds)
                return
            if what == "park":  # until somebody spawns it again
                return
            if what == "take":
                if self._free == 0:
                    self._queue.append(process)
                    return
                self._free -= 1
            elif self._queue:
                self.spawn(self._queue.popleft())
            else:
                self._free += 1


@dataclass(frozen=True)
class World:
    """What is true: step times, and how runs are launched."""

    name: str
    step_s: tuple[float, ...]  # mean of each condition
    seeds: int
    steps: int
    workers: int
    draw: Callable[[random.Random], float]  # a step's time over its mean
    stagger_s: float = 0.0
    startup_s: float = 0.0
    permits: int = 10**9
    remote: float = 0.0
    failures_per_hour: float = 0.0
    save_every: int = 20
    retries: int = 2
    retry_delay_s: float = 1.0
    run_deviation: float = 0.0  # of a run's mean step time over its condition's


class Reference:
    """One campaign: a launcher, and a worker for each attempt."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self._clock = Clock(world.permits)
        self._waiting = deque((s, 0, 0) for _ in range(world.seeds) for s in world.step_s)
        self._again: list[tuple[float, tuple[float, int, int]]] = []  # due; step_s, steps saved, failures
        self._busy = 0
        self._parked: list[Process] = []
        self._launcher = self._launch()
        self._ended_s = 0.0

    def makespan_s(self) -> float:
        self._clock.spawn(self._launcher)
        self._clock.run()
        return self._ended_s

    def _launch(self) -> Process:
        while self._waiting or self._again or self._busy:
            attempt = self._next_attempt()
            if attempt is None:
                self._parked.append(self._launcher)
                yield ("park", 0.0)
                continue
            self._busy += 1
            self._clock.spawn(self._work(*attempt))
            yield ("sleep", self._world.stagger_s)

    def _next_attempt(self) -> tuple[float, int, int] | None:
        if self._busy >= self._world.workers:
            return None
        for entry in self._again:
            if entry[0] <= self._clock.now:
                self._again.remove(entry)
                return entry[1]
        return self._waiting.popleft() if self._waiting else None

    def _work(self, step_s: float, done: int, failures: int) -> Process:
        world = self._world
        yield ("sleep", world.startup_s)
        rate = world.failures_per_hour / 3600
        left_s = self._rng.expovariate(rate) if rate and failures < world.retries else math.inf
        saved = done
        if world.run_deviation:
            step_s *= self._rng.gauss(1, world.run_deviation)
        while done < world.steps:
            length = step_s * world.draw(self._rng)
            if length > left_s:
                yield ("sleep", left_s)
                self._again.append((self._clock.now + world.retry_delay_s, (step_s, saved, failures + 1)))
                self._clock.spawn(self._ring(), self._clock.now + world.retry_delay_s)
                break
            left_s -= length
            yield from self._step(length)
            done += 1
            saved = done if done % world.save_every == 0 else saved
        self._busy -= 1
        self._ended_s = self._clock.now
        self._wake()

    def _step(self, length: float) -> Process:
        remote = self._world.remote
        yield ("sleep", length * (1 - remote))
        if remote:
            yield ("take", 0.0)
            yield ("sleep", length * remote)
            yield ("give", 0.0)

    def _ring(self) -> Process:
        yield ("sleep", 0.0)
        self._wake()

    def _wake(self) -> None:
        if self._parked:
            self._clock.spawn(self._parked.pop())
