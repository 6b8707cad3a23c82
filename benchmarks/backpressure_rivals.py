"""Other ways to choose a batch size, for comparison: each takes a step's facts and names the next batch."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from retrain.control.rules.usl import StepTimeFitter

LOWEST, HIGHEST, FIRST, GROUP = 1, 64, 8, 8
RATIO = 1.12
MARGIN_GAIN = 0.01  # log gain that another doubling, or a change of size, must promise
SHRINKAGE = 3.0  # observations at which half of a residual is believed
KEPT_PER_STEP, MOST_COUNTED = 0.98, 20.0
PROBE_FIRST, PROBE_GROWTH, PROBE_LAST = 8, 1.5, 40
CUSUM_DRIFT, CUSUM_ALARM, CUSUM_CLIP = 0.7, 7.0, 3.0  # the best of seven settings tried


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


def grid() -> list[int]:
    sizes, size = [LOWEST], float(LOWEST)
    while sizes[-1] < HIGHEST:
        size = max(size * RATIO, sizes[-1] + 1)
        sizes.append(min(HIGHEST, round(size)))
    return sorted({*sizes, FIRST})


class PlainCurve:
    """A simpler controller: one fitted curve, shrunken residuals, probes, and a CUSUM.

    What back pressure looks like without a belief over many curves: per-size running means of log
    throughput, a non-negative fit of the step time, the fit plus a shrunken residual as the score of every
    size, doubling at the start, small two-sided probes with growing intervals, and a fresh start when the
    curve has changed.
    """

    def __init__(self) -> None:
        self.batch_size = FIRST
        self._sizes = grid()
        self._p = np.array(self._sizes, dtype=float) * GROUP
        self._fitter = StepTimeFitter(self._p)
        self._failed, self._noise = HIGHEST + 1, 0.1
        self._largest = FIRST
        self._forget()

    def _forget(self) -> None:
        """Begin anew; what ran out of memory stays known."""
        self._count = np.zeros(len(self._sizes))
        self._mean = np.zeros(len(self._sizes))
        self._doubling, self._faster, self._slower = True, 0.0, 0.0
        self._since_probe, self._interval, self._side = 0, float(PROBE_FIRST), 1

    def observe(
        self, tokens: float, time_s: float, out_of_memory: bool, memory_fraction: float | None
    ) -> None:
        """Take the step that ran with `batch_size` and set the next one."""
        index = self._sizes.index(self.batch_size)
        if out_of_memory:
            self._failed, self._doubling = min(self._failed, self.batch_size), False
            self._largest = min(self._largest, max(LOWEST, self._failed // 2))
            self.batch_size = self._nearest((self._largest + self._failed) // 2)
            return
        self._largest = max(self._largest, self.batch_size)
        value = math.log(tokens / time_s)
        if self._count[index] > 1.0 and self._has_changed(value - float(self._mean[index])):
            self._forget()
        self._add(index, value)
        self.batch_size = self._sizes[self._chosen(index)]

    def _add(self, index: int, value: float) -> None:
        self._count *= KEPT_PER_STEP
        change = value - float(self._mean[index])
        if self._count[index] > 1.0:
            self._noise += 0.05 * (1.25 * min(abs(change), 3.0 * self._noise) - self._noise)
            change = max(-3.0 * self._noise, min(3.0 * self._noise, change))
        self._count[index] = min(self._count[index] + 1.0, MOST_COUNTED)
        self._mean[index] += change / self._count[index] if self._count[index] > 1.0 else change

    def _has_changed(self, surprise: float) -> bool:
        scaled = max(-CUSUM_CLIP, min(CUSUM_CLIP, surprise / max(self._noise, 0.01)))
        self._faster = max(0.0, self._faster + scaled - CUSUM_DRIFT)
        self._slower = max(0.0, self._slower - scaled - CUSUM_DRIFT)
        return max(self._faster, self._slower) > CUSUM_ALARM

    def _chosen(self, index: int) -> int:
        allowed = [size < self._failed and size <= 2 * self._largest for size in self._sizes]
        if self._doubling:
            following = self._sizes.index(self._nearest(2 * self._sizes[index]))
            before = self._mean[self._sizes.index(self._nearest(self._sizes[index] / 2))]
            pays = np.count_nonzero(self._count) == 1 or self._mean[index] - before > MARGIN_GAIN
            if following > index and allowed[following] and pays:
                return following
            self._doubling = False
        score = np.where(allowed, self._score(), -math.inf)
        best = int(score.argmax())
        if best != index and score[best] - score[index] < MARGIN_GAIN and allowed[index]:
            best = index
        self._since_probe += 1
        if self._since_probe < self._interval:
            return best
        self._since_probe, self._interval = 0, min(self._interval * PROBE_GROWTH, PROBE_LAST)
        self._side = -self._side
        probe = max(0, min(len(self._sizes) - 1, best + 2 * self._side))
        return probe if allowed[probe] else best

    def _score(self) -> np.ndarray:
        """Fitted log throughput, plus as much of each size's residual as its observations bear."""
        seen = self._count > 0.0
        time = np.where(seen, self._p * np.exp(-self._mean), 1.0)
        if np.count_nonzero(seen) < 3:
            return np.where(seen, self._mean, -math.inf)
        fit = self._fitter.fit(time, np.where(seen, self._count, 0.0))
        model = np.log(self._p / (fit.lead + fit.load * self._p + fit.crowd * self._p**2))
        residual = np.where(seen, self._mean - model, 0.0)
        return np.asarray(model + residual * self._count / (self._count + SHRINKAGE))

    def _nearest(self, size: float) -> int:
        fitting = [one for one in self._sizes if one < self._failed]
        return min(fitting or [LOWEST], key=lambda one: abs(math.log(one / size)))
