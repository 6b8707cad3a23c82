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
from retrain.control.rules.usl import StepTime, StepTimeFitter

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
        return math.sqrt(self.noise_variance)

    def relative(self, throughput: float) -> float:
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


SHAPES_BEST = 16  # hypotheses for the best size, log-spaced, plus one without an optimum
SHAPES_KNEE = 9  # hypotheses for the size at which load equals lead, plus one without load
MODEL_DEVIATION = 0.05  # standard deviation, in logs, of real curves from the law at one size
ENOUGH_SIZES = 3  # a curve has three coefficients
NEAR, SURE = 3.0, 0.9  # an optimum is determined if it is within this factor with this probability
ENOUGH_SAMPLES = 5  # one estimate of the noise scale is off by a factor of two or more
LEAST_PHI, LARGEST_PHI = 1e-9, 1e18  # rollouts; beyond these limits no realistic batch makes a difference
SMOOTHING = 0.9  # of the log, per sample; the noise scale grows over a run


class Posterior:
    """Expected log throughput per size, up to a common constant. All arrays have the shape (sizes,).

    Over the curves of the scalability law, on a fixed grid of hypotheses, plus a deviation of each size from
    the curve: staircases and plateaus are not scalability curves.
    """

    def __init__(self, sizes: tuple[int, ...], group_size: int) -> None:
        batch = np.array(sizes, dtype=float)
        best = np.append(np.geomspace(max(0.5 * batch[0], 0.75), 2.0 * batch[-1], SHAPES_BEST), np.inf)
        knee = np.append(np.geomspace(0.5 * batch[0], 4.0 * batch[-1], SHAPES_KNEE), np.inf)
        load, crowd = 1.0 / knee[None, :, None], 1.0 / best[:, None, None] ** 2
        table = np.log(batch) - np.log(1.0 + load * batch + crowd * batch**2)
        shapes = table.reshape(-1, len(sizes))
        self._p_star: Floats = np.repeat(best * group_size, len(knee))  # of every hypothesis
        self._least_p_star, self._largest_p_star = best[0] * group_size, best[-2] * group_size
        self._weights: Floats = np.full(len(shapes), 1.0 / len(shapes))
        self._shapes: Floats = shapes
        self._shapes_and_squares: Floats = np.hstack([shapes, shapes**2])
        self.expected: Floats = np.zeros(len(sizes))
        self.shape_variance: Floats = np.zeros(len(sizes))  # from the unknown shape of the curve
        self.own_variance: Floats = np.zeros(len(sizes))  # of the size's deviation from the curve
        self.precision: Floats = np.zeros(len(sizes))  # 1 / variance of the size's mean around the curve

    def update(self, measured: Measurements) -> None:
        """Recompute everything from the measurements; no history is kept here."""
        model_variance = MODEL_DEVIATION**2
        explained = measured.count / (measured.noise_variance / model_variance + measured.count)
        self.precision = explained / model_variance
        self.own_variance = model_variance - model_variance * explained
        self._weights, level = self._posterior(measured.mean)
        levelled = self._weights * level
        sizes = len(measured.mean)
        moments = self._weights @ self._shapes_and_squares
        curve = moments[:sizes] + float(levelled.sum())
        square = moments[sizes:] + 2.0 * (levelled @ self._shapes) + float(levelled @ level)
        self.shape_variance = np.maximum(square - curve * curve, 0.0)
        self.expected = curve + explained * (measured.mean - curve)

    def determines(self, p_star: float) -> bool:
        """Whether the optimum is probably within a factor of `NEAR`, or, if infinite, above the largest size.

        Optima below the smallest hypothesis are not distinguished, nor are those above the largest one.
        """
        if math.isinf(p_star):
            near = self._p_star > 0.5 * self._largest_p_star
        else:
            inside = min(max(p_star, self._least_p_star), self._largest_p_star)
            near = (self._p_star >= inside / NEAR) & (self._p_star <= inside * NEAR)
        return float(self._weights[near].sum()) >= SURE

    def _posterior(self, mean: Floats) -> tuple[Floats, Floats]:
        """Return weight and best-fitting constant of every hypothesis, shapes (hypotheses,)."""
        total = float(self.precision.sum())
        if total <= 0.0:
            count = len(self._shapes)
            return np.full(count, 1.0 / count), np.zeros(count)
        weighted = self.precision * mean
        level = (float(weighted.sum()) - self._shapes @ self.precision) / total
        misfit = self._shapes_and_squares @ np.concatenate((-2.0 * weighted, self.precision))
        misfit -= total * level * level
        weights = np.exp(0.5 * (float(misfit.min()) - misfit))
        return weights / float(weights.sum()), level


def goodput_best(sigma: float, kappa: float, noise_scale: float) -> float:
    """Return the concurrency of the highest goodput, at least 1; infinite if goodput has no maximum.

    Goodput is throughput x (phi + p0) / (phi + p): samples of a large batch are redundant. p0, the reference
    batch, moves no optimum. The positive root of 2 kappa p^3 + (sigma - kappa + kappa phi) p^2 =
    (1 - sigma) phi, where the derivative of goodput vanishes; phi is the noise scale, in samples like p.
    """
    phi = min(max(noise_scale, LEAST_PHI), LARGEST_PHI)
    square = sigma - kappa + kappa * phi
    constant = (1.0 - sigma) * phi
    if kappa <= 0.0:
        return max(1.0, math.sqrt(constant / square)) if square > 0.0 else math.inf
    # The cubic is positive here and convex beyond, so Newton's method descends to the root. For large phi
    # the second bound, the optimum of throughput, is closer than the first.
    root = max(0.0, -square) / (2.0 * kappa) + math.pow(constant / (2.0 * kappa), 1.0 / 3.0)
    root = min(root, math.sqrt((1.0 - sigma) / kappa))
    for _ in range(60):
        slope = 6.0 * kappa * root**2 + 2.0 * square * root
        if slope <= 0.0:
            break
        step = (2.0 * kappa * root**3 + square * root**2 - constant) / slope
        root -= step
        if step <= 1e-12 * root:
            break
    return max(1.0, root)


@dataclass
class NoiseScaleTrack:
    """A running geometric mean of the measured gradient noise scale."""

    log_mean: float = 0.0
    samples: int = 0

    def add(self, noise_scale: float | None) -> None:
        """Add a sample; estimates that are not positive and finite are skipped."""
        if noise_scale is None or not (0.0 < noise_scale < math.inf):
            return
        self.samples += 1
        share = max(1.0 - SMOOTHING, 1.0 / self.samples)
        self.log_mean += share * (math.log(noise_scale) - self.log_mean)

    @property
    def noise_scale(self) -> float | None:
        """None until there are enough samples."""
        return math.exp(self.log_mean) if self.samples >= ENOUGH_SAMPLES else None


@dataclass(frozen=True)
class FittedCurve:
    """A fit over concurrency p; `time` is None while too few sizes were measured."""

    time: StepTime | None = None
    is_determined: bool = False  # whether measurements determine its optimum, or that there is none

    def best(self, noise_scale: float | None) -> float | None:
        """Return the best concurrency for throughput (goodput, given a noise scale).

        Infinite if the curve has no optimum, None unless the curve is determined.
        """
        if self.time is None or not self.is_determined:
            return None
        if noise_scale is None:
            return max(1.0, self.time.best)
        sigma, kappa, _ = self.time.coefficients
        return goodput_best(sigma, kappa, noise_scale)

    def excess(self, p: float, log_throughput: float) -> float:
        """Return measured over fitted throughput; 1 without a fit."""
        if self.time is None:
            return 1.0
        return math.exp(log_throughput) / self.time.throughput(p)


def fit_curve(fitter: StepTimeFitter, concurrency: Floats, posterior: Posterior, mean: Floats) -> FittedCurve:
    """Fit the mean log throughputs of all sizes measured so far, shape (sizes,), each with its precision."""
    if np.count_nonzero(posterior.precision) < ENOUGH_SIZES:
        return FittedCurve()
    time = fitter.fit(concurrency * np.exp(-mean), posterior.precision)
    return FittedCurve(time, posterior.determines(time.best))
