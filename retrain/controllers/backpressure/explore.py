"""Chooses the next batch size from what is believed: warm-up by doubling, rare probes, else the best.

Optimism decides between sizes (expected value plus a share of its uncertainty), so that a size is tried
again where trying can pay and left alone where it cannot.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from retrain.controllers.backpressure.measurements import Measurements
from retrain.controllers.backpressure.posterior import Posterior

FloatArray = NDArray[np.float64]
Purpose = Literal["warmup", "probe", "operate"]

WARMUP_GAIN = 0.01  # log gain that the next doubling must promise, with optimism
SHAPE_OPTIMISM, OWN_OPTIMISM = 0.5, 0.3  # standard deviations granted for exploring
INCREASE_GAIN, THROTTLE_GAIN = 0.02, 0.01  # log gain worth a change of batch; less is churn
PROBE_OPTIMISM = 2.0
PROBE_LOSS = 0.3  # log loss that a single probing step may be expected to cost
PROBE_FIRST, PROBE_GROWTH, PROBE_LAST = 10.0, 1.5, 40.0  # steps between probes: often after a change


@dataclass(frozen=True)
class Situation:
    """All that a choice depends on; sizes by their index.

    Attributes:
        sizes: ascending batch sizes.
        value: expected log objective per size.
        highest: index of the largest size that memory allows.
        current: index of the size that just ran.
        best: batch size of the fitted optimum, infinite if none is known.
        throttle_margin, increase_margin: as in the settings.
    """

    sizes: tuple[int, ...]
    value: FloatArray
    highest: int
    current: int
    best: float
    throttle_margin: float
    increase_margin: float


@dataclass
class Explorer:
    """The little state that exploring needs."""

    warming: bool = True
    warmup_steps: int = 0
    steps_since_probe: int = 0
    probe_interval: float = PROBE_FIRST
    purpose: Purpose = "warmup"

    def restart(self) -> None:
        """The curve changed: warm up again."""
        self.warming, self.warmup_steps = True, 0
        self.steps_since_probe, self.probe_interval = 0, PROBE_FIRST

    def choose(self, posterior: Posterior, measured: Measurements, at: Situation, warmup_limit: int) -> int:
        """Index of the size to run next; `purpose` says what for."""
        self.warmup_steps += 1
        doubled = self._doubled(posterior, at, warmup_limit) if self.warming else None
        if doubled is not None:
            self.purpose = "warmup"
            return doubled
        self.warming = False
        best = _operating_point(posterior, at)
        probe = self._probe(posterior, measured, at, best)
        self.purpose = "operate" if probe is None else "probe"
        return best if probe is None else probe

    def _doubled(self, posterior: Posterior, at: Situation, warmup_limit: int) -> int | None:
        index = min(bisect_right(at.sizes, 2 * at.sizes[at.current]) - 1, at.highest)
        if self.warmup_steps > warmup_limit or index <= at.current:
            return None
        hope = float(at.value[index]) + SHAPE_OPTIMISM * math.sqrt(posterior.shape_variance[index])
        return index if hope > at.value[at.current] + WARMUP_GAIN else None

    def _probe(self, posterior: Posterior, measured: Measurements, at: Situation, best: int) -> int | None:
        """A size that may be better than believed, every now and then: beliefs cannot see every change."""
        self.steps_since_probe += 1
        if self.steps_since_probe < self.probe_interval:
            return None
        self.steps_since_probe = 0
        self.probe_interval = min(self.probe_interval * PROBE_GROWTH, PROBE_LAST)
        noise = measured.noise_variance / np.maximum(measured.count, 1.0)
        hope = at.value + PROBE_OPTIMISM * np.sqrt(posterior.shape_variance + posterior.own_variance + noise)
        hope[at.value < at.value[best] - PROBE_LOSS] = -math.inf
        hope[best] = -math.inf
        index = int(hope[: at.highest + 1].argmax())
        return index if hope[index] > -math.inf else None


def _operating_point(posterior: Posterior, at: Situation) -> int:
    """The most promising allowed size, held below the throttle margin, and kept unless a change pays."""
    optimism = SHAPE_OPTIMISM * np.sqrt(posterior.shape_variance) + OWN_OPTIMISM * np.sqrt(
        posterior.own_variance
    )
    hope = (at.value + optimism)[: at.highest + 1]
    index = int(hope.argmax())
    limit = at.throttle_margin * at.best
    limit_index = nearest(at.sizes, limit)
    if index > limit_index:
        below = int(hope[: limit_index + 1].argmax())
        if at.value[index] - at.value[below] < 1.5 * _margin_cost(at.throttle_margin):
            index = below
    if at.current > at.highest or at.current > limit_index >= index:
        return index
    needed = INCREASE_GAIN if index > at.current else THROTTLE_GAIN
    pays = hope[index] - hope[at.current] >= needed
    far_below = at.sizes[at.current] < at.increase_margin * limit < math.inf
    return index if pays or (far_below and index > at.current) else at.current


def _margin_cost(margin: float) -> float:
    """Log loss of running at margin x p* on the sharpest curve of the law (no contention).

    More than this (with room for error) is no margin but a mistake: the fit's p* is then too low.
    """
    return math.log((1.0 + margin * margin) / (2.0 * margin))


PER_DOUBLING = 8  # steps of 6 to 12 %; a scalability curve moves under 1 % between neighbours at its top


def batch_sizes(
    lowest: int, highest: int, configured: int, wanted: Iterable[int] | None = None
) -> tuple[int, ...]:
    """Return the sizes wanted (by default a ladder) within the bounds, with these and the configured size."""
    sizes = {lowest, highest, configured, *(_ladder(highest) if wanted is None else wanted)}
    return tuple(sorted(size for size in sizes if lowest <= size <= highest))


def _ladder(highest: int) -> Iterator[int]:
    """Every size up to 16, then multiples of a power of two."""
    yield from range(1, 2 * PER_DOUBLING + 1)
    stride = 2
    while stride * PER_DOUBLING < highest:
        yield from (stride * eighth for eighth in range(PER_DOUBLING + 1, 2 * PER_DOUBLING + 1))
        stride *= 2


def nearest(sizes: tuple[int, ...], size: float) -> int:
    """Index of the size whose ratio to `size` is nearest 1; the last for infinity."""
    if math.isinf(size):
        return len(sizes) - 1
    above = bisect_right(sizes, size)
    if above in (0, len(sizes)):
        return min(above, len(sizes) - 1)
    return above if size * size > sizes[above - 1] * sizes[above] else above - 1
