"""Other ways to choose a batch size, for comparison: each takes a step's facts and names the next batch."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

LOWEST, HIGHEST, FIRST, GROUP = 1, 64, 8, 8


class Controller(Protocol):
    """What the simulator drives."""

    batch_size: int

    def observe(
        self, tokens: float, time_s: float, out_of_memory: bool, memory_fraction: float | None
    ) -> None:
        """Take the step that ran with `batch_size` and set the next one."""


def bounded(batch: float) -> int:
    return int(min(HIGHEST, max(LOWEST, round(batch))))


class Fixed:
    """The configured batch, always."""

    def __init__(self) -> None:
        self.batch_size = FIRST

    def observe(
        self, tokens: float, time_s: float, out_of_memory: bool, memory_fraction: float | None
    ) -> None:
        if out_of_memory:
            self.batch_size = max(LOWEST, self.batch_size // 2)


class PublishedContract:
    """The published back-pressure contract taken at its word.

    Ten warm-up steps sweep 1, 2, 4, ... and wrap around at the highest batch; a window of 100 observations
    is fitted by ordinary least squares; without crosstalk p* reads 1; what ran out of memory is forgotten.
    """

    def __init__(self) -> None:
        self.batch_size = FIRST
        self._sweep = [2**power for power in range(7)]
        self._step = 0
        self._window: list[tuple[float, float]] = []
        self._average = 0.0

    def observe(
        self, tokens: float, time_s: float, out_of_memory: bool, memory_fraction: float | None
    ) -> None:
        self._step += 1
        if out_of_memory:
            self.batch_size = max(LOWEST, self.batch_size // 2)
            return
        throughput = tokens / time_s
        self._average = 0.9 * self._average + 0.1 * throughput if self._average else throughput
        self._window = [*self._window[-99:], (self.batch_size * GROUP, throughput)]
        if self._step <= 10:
            self.batch_size = self._sweep[self._step % len(self._sweep)]
            return
        sigma, kappa, rate = self._fitted()
        p = self.batch_size * GROUP
        p_star = math.sqrt(max(0.0, 1.0 - sigma) / kappa) if kappa > 0.0 else 1.0
        predicted = rate * p / (1.0 + sigma * (p - 1.0) + kappa * p * (p - 1.0))
        retrograde = p > 0.85 * p_star and kappa > 0.0
        below = self._average <= 1.1 * predicted and p < 0.5 * 0.85 * p_star
        if retrograde or below:
            self.batch_size = bounded(0.85 * p_star / GROUP)

    def _fitted(self) -> tuple[float, float, float]:
        p, x = np.array(self._window).T
        if len(np.unique(p)) < 3:
            return 0.0, 0.0, float((x / p).max())
        crowd, load, lead = np.polyfit(p, p / x, 2)
        total = lead + load + crowd
        if total <= 0.0:
            return 0.0, 0.0, float((x / p).max())
        kappa = max(0.0, crowd / total)
        return min(1.0, max(0.0, load / total + kappa)), kappa, 1.0 / total


class Aimd:
    """Additive increase by 1; multiplicative decrease when the smoothed throughput falls by a tenth."""

    def __init__(self) -> None:
        self.batch_size = FIRST
        self._average = self._best = 0.0

    def observe(
        self, tokens: float, time_s: float, out_of_memory: bool, memory_fraction: float | None
    ) -> None:
        throughput = 0.0 if out_of_memory else tokens / time_s
        self._average = 0.7 * self._average + 0.3 * throughput if self._average else throughput
        self._best = max(0.99 * self._best, self._average)
        if out_of_memory or self._average < 0.9 * self._best:
            self.batch_size, self._best = bounded(0.7 * self.batch_size), self._average
        else:
            self.batch_size = bounded(self.batch_size + 1)


class HillClimb:
    """Keep walking while three steps' median throughput rises, else turn round; strides of a fifth."""

    def __init__(self) -> None:
        self.batch_size = FIRST
        self._stride = 1.2
        self._last = 0.0
        self._here: list[float] = []

    def observe(
        self, tokens: float, time_s: float, out_of_memory: bool, memory_fraction: float | None
    ) -> None:
        self._here.append(0.0 if out_of_memory else tokens / time_s)
        if len(self._here) < 3 and not out_of_memory:
            return
        median = float(np.median(self._here))
        if median < self._last:
            self._stride = 1.0 / self._stride
        self._last, self._here = median, []
        moved = bounded(self.batch_size * self._stride)
        self.batch_size = (
            moved if moved != self.batch_size else bounded(moved + (1 if self._stride > 1 else -1))
        )


class Gradient2:
    """Netflix's Gradient2 limit with its published defaults; the round-trip time is the step time.

    Source: concurrency-limits (Netflix, 2018): ratio of long-term to present latency, a queue of 4.
    """

    def __init__(self) -> None:
        self.batch_size = FIRST
        self._limit = float(FIRST)
        self._long = 0.0
        self._samples = 0

    def observe(
        self, tokens: float, time_s: float, out_of_memory: bool, memory_fraction: float | None
    ) -> None:
        if out_of_memory:
            self._limit *= 0.5
        else:
            self._limit = self._updated(time_s)
        self._limit = min(float(HIGHEST), max(float(LOWEST), self._limit))
        self.batch_size = bounded(self._limit)

    def _updated(self, time_s: float) -> float:
        self._samples += 1
        share = 1.0 / self._samples if self._samples <= 10 else 2.0 / 601.0
        self._long += share * (time_s - self._long)
        if self._long > 2.0 * time_s:
            self._long *= 0.95
        gradient = max(0.5, min(1.0, 1.5 * self._long / time_s))
        return 0.8 * self._limit + 0.2 * (self._limit * gradient + 4.0)
