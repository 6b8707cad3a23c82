"""Measurements per batch size: an exponentially aging mean of log throughput, the noise, and change points.

Logs, because noise and gains of throughput are relative. One mean per size instead of one sliding window, so
many steps at one size do not displace the measurements of the others.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from retrain.base.rollouts import Floats
from retrain.control.rules import StateDict, require

WINDOW = 100.0  # largest count of a mean, so that it follows slow drift
KEPT_PER_STEP = 0.993  # other sizes' observations lose half of their weight in 100 steps
NOISE_PRIOR = 0.15  # standard deviation of log throughput before any size was repeated
NOISE_PRIOR_COUNT = 6.0
NOISE_WINDOW = 60.0
NOISE_FLOOR = 0.01  # real noise is never lower; a smaller value would cause false alarms
CLIP = 3.0  # standard deviations at which a residual is clipped
FIRST_WEIGHT = 0.3  # the first step compiles kernels and fills caches
STALE_DEVIATION = 2.0  # of old logs after a change point; 1.0 lost 0.5 % more throughput on late jumps


@dataclass(frozen=True)
class StepObservation:
    """One step that completed or ran out of memory.

    Raises:
        ValueError: a value is not a valid measurement and would corrupt the fit.
    """

    batch_size: int  # prompts in the step
    group_size: int  # rollouts per prompt
    tokens: float  # number of sampled tokens, informative or not
    step_time_s: float
    out_of_memory: bool = False  # the step did not fit; tokens and time are then ignored
    memory_fraction: float | None = None  # peak in use, in [0, 1]; None if unknown or reserved in advance
    noise_scale: float | None = None  # gradient noise scale in samples; skipped unless positive and finite

    def __post_init__(self) -> None:
        require("batch_size", self.batch_size, self.batch_size >= 1, "at least 1")
        require("group_size", self.group_size, self.group_size >= 1, "at least 1")
        if self.memory_fraction is not None:
            inside = 0.0 <= self.memory_fraction <= 1.0
            require("memory_fraction", self.memory_fraction, inside, "a number in [0, 1]")
        if not self.out_of_memory:
            require("tokens", self.tokens, 0.0 < self.tokens < math.inf, "a positive, finite count")
            finite = 0.0 < self.step_time_s < math.inf
            require("step_time_s", self.step_time_s, finite, "a positive, finite number of seconds")
            rate = self.tokens / self.step_time_s
            require("tokens / step_time_s", rate, 1e-30 < rate < 1e30, "a rate from 1e-30 to 1e30 a second")


@dataclass
class Measurements:
    """Means and weights, one per size; all logs relative to `origin`, the first observation."""

    count: Floats
    mean: Floats
    origin: float | None = None
    noise_variance: float = NOISE_PRIOR**2
    noise_count: float = NOISE_PRIOR_COUNT

    @classmethod
    def nothing(cls, sizes: int) -> Measurements:
        return cls(np.zeros(sizes), np.zeros(sizes))

    @property
    def noise(self) -> float:
        """Standard deviation of one observation's log."""
        return math.sqrt(self.noise_variance)

    def relative(self, throughput: float) -> float:
        """Return the log of `throughput` over the first one observed."""
        if self.origin is None:
            self.origin = math.log(throughput)
        return math.log(throughput) - self.origin

    def learn_noise(self, index: int, surprise: float) -> None:
        """Update the noise from the residual of an observation at a known size."""
        if self.count[index] <= 0.5:
            return
        count = float(self.count[index])
        clipped = min(abs(surprise), CLIP * self.noise)
        self.noise_count = min(self.noise_count + 1.0, NOISE_WINDOW)
        self.noise_variance += (clipped**2 * count / (1.0 + count) - self.noise_variance) / self.noise_count
        self.noise_variance = max(self.noise_variance, NOISE_FLOOR**2)

    def add(self, index: int, value: float) -> None:
        """Add an observation to its size's mean, and age every size by one step."""
        first = not self.count.any()
        self.count *= KEPT_PER_STEP
        before = float(self.count[index])
        count = min(before + (FIRST_WEIGHT if first else 1.0), WINDOW)
        change = value - float(self.mean[index])
        if before > 0.2:
            change = max(-CLIP * self.noise, min(CLIP * self.noise, change))
        self.mean[index] += change / max(count, 1.0) if before > 0.0 else change
        self.count[index] = count

    def distrust(self) -> None:
        """Discount all earlier observations after a change point."""
        np.minimum(self.count, self.noise_variance / STALE_DEVIATION**2, out=self.count)

    def state(self) -> StateDict:
        """Return plain data; floats round-trip exactly through JSON."""
        return asdict(self) | {"count": self.count.tolist(), "mean": self.mean.tolist()}

    @classmethod
    def from_state(cls, state: StateDict) -> Measurements:
        arrays = {name: np.array(state[name], dtype=float) for name in ("count", "mean")}
        return cls(**{**state, **arrays})


DRIFT = 0.5  # standard deviations per step that are ignored
ALARM = 7.0  # accumulated standard deviations; under one false alarm in 1000 steps of pure noise
MOST_ADDED = 3.0  # by one step, so that one stall raises no alarm
IMPLAUSIBLE = 0.7  # log of 2: halving or doubling the batch cannot explain a larger jump
SAME_STALL = 0.2  # logs; slow steps that differ by less are one change, not several stalls
CONFIRMING = 1  # earlier slow steps that confirm a change at a known size
CONFIRMING_NEW = 2  # the same at a new size: one pair of stalls there cost 45 % of a whole run
MOST_STALLS = 4  # consecutive, however much they differ

Residual = Literal["usual", "stall", "changed"]


@dataclass
class ChangeDetector:
    """Detects a change point in the curve, as opposed to noise and stalls, in one pass over the residuals.

    Two-sided CUSUM (Page, Biometrika 41, 1954), with two rules for residuals that no curve explains: a step
    far too slow is a stall until the next steps confirm it; a step far too fast proves that older ones were
    slow.
    """

    faster: float = 0.0  # accumulated standardized residuals
    slower: float = 0.0
    stalls: int = 0  # consecutive
    stalled: float = 0.0  # surprise of the last stall

    def judge(self, surprise: float, deviation: float, noise: float, *, is_known: bool = True) -> Residual:
        """Classify one observation.

        Args:
            surprise: log of measured over predicted throughput.
            deviation: the prediction's standard deviation, noise included.
            noise: standard deviation of the noise alone.
            is_known: whether this size was measured often enough for a slow step to mean a change.
        """
        # steps that are equally slow confirm a change: stalls vary in length, a slower machine does not
        agrees = abs(surprise - self.stalled) < SAME_STALL + 2.0 * noise
        enough = (CONFIRMING if is_known else CONFIRMING_NEW) if agrees else MOST_STALLS
        if surprise < -(IMPLAUSIBLE + 2.0 * noise) and self.stalls < enough:
            self.stalls, self.stalled = self.stalls + 1, surprise
            return "stall"
        self.stalls = 0
        scaled = max(-MOST_ADDED, min(MOST_ADDED, surprise / deviation))
        self.faster = max(0.0, self.faster + scaled - DRIFT)
        self.slower = max(0.0, self.slower - scaled - DRIFT)
        implausible = surprise > IMPLAUSIBLE + 2.0 * noise
        if implausible or self.faster > ALARM or self.slower > ALARM:
            self.faster = self.slower = 0.0
            return "changed"
        return "usual"
