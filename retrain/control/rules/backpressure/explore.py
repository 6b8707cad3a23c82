"""Choose the next batch size from the posterior: doubling in warm-up, occasional probes, else the best.

Sizes are ranked by an upper confidence bound (expected value plus a multiple of its standard deviation), so
a size is tried again only where that may pay. Sizes that memory does not allow are left out.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy as np

from retrain.base.rollouts import Floats
from retrain.config.schema import BackPressureSection
from retrain.control.rules import StateDict
from retrain.control.rules.backpressure.measurements import Measurements, Posterior
from retrain.records.step_row import Action, Regime

Purpose = Literal["warmup", "probe", "operate"]  # why a batch size was chosen

HEADROOM, SHORTFALL = 1.1, 0.8  # measured over fitted throughput
WARMUP_GAIN = 0.01  # least log gain expected of the next doubling, optimism included
SHAPE_OPTIMISM, OWN_OPTIMISM = 0.5, 0.3  # standard deviations added as optimism
INCREASE_GAIN, THROTTLE_GAIN = 0.02, 0.01  # least log gain that justifies a change of batch
PROBE_OPTIMISM = 2.0
PROBE_LOSS = 0.3  # largest expected log loss of a probe
PROBE_FIRST, PROBE_GROWTH, PROBE_LAST = 10.0, 1.5, 40.0  # steps between probes, fewest after a change

GROWTH = 2  # limit, times the largest success: memory grows at most proportionally
FAILURES = 2  # allowed while exploring, counted after the first success
FINE = 16  # the least growth after a failure is a sixteenth; an eighth left 7 % of throughput unused
CEILING = 0.95  # memory fraction to stay under; allocators fragment
RETREAT = 0.8  # of a size that fitted before and no longer does
FIRST_RETREAT = 0.5  # of a configured size that never fitted
SPAN = 2.0  # least ratio of two sizes for a linear fit of memory fractions


@dataclass
class MemoryLimit:
    """The largest batch allowed, from sizes that ran out of memory, sizes that fitted, and telemetry.

    Sizes, in prompts per step, at or above the smallest that ran out of memory are never allowed again: no
    later measurement can prove that they fit. Without telemetry, the batch grows by a sixteenth at a time
    after a failure, since only a failure costs a step; after the second failure growth stops.
    """

    largest: int  # that fitted; the configured size before any did
    succeeded: bool = False  # whether any size has fitted
    failed: int | None = None  # the smallest size that ran out of memory
    failures: int = 0
    peaks: dict[int, float] = field(default_factory=dict)  # the highest memory fraction measured, by size

    def fitted(self, size: int, memory_fraction: float | None) -> None:
        self.largest = max(self.largest, size)
        self.succeeded = True
        if memory_fraction is not None:
            self.peaks[size] = max(memory_fraction, self.peaks.get(size, 0.0))

    def exhausted(self, size: int) -> None:
        self.failures += self.succeeded
        self.failed = size if self.failed is None else min(self.failed, size)
        if size <= self.largest:
            self.largest = max(1, int((RETREAT if self.succeeded else FIRST_RETREAT) * size))

    def highest(self, sizes: Sequence[int]) -> int:
        """Return the largest allowed of `sizes` (ascending), or the first if none is."""
        if self.failed is None:
            reach = GROWTH * self.largest
        elif self.failures >= FAILURES:
            reach = min(self.largest, self.failed - 1)
        else:
            following = bisect_left(sizes, self.largest + max(1, self.largest // FINE))
            reach = min(sizes[min(following, len(sizes) - 1)], self.failed - 1)
        predicted = math.inf  # the size at which memory reaches the ceiling
        if self.peaks:
            smallest, largest = min(self.peaks), max(self.peaks)
            top = self.peaks[largest]
            slope = top / largest  # proportional growth is the worst case
            if largest >= SPAN * smallest:
                slope = max(0.0, (top - self.peaks[smallest]) / (largest - smallest))
            if slope > 0.0:
                predicted = largest + (CEILING - top) / slope
        return sizes[max(0, bisect_right(sizes, min(reach, predicted)) - 1)]

    def state(self) -> StateDict:
        """Return plain data; JSON has no integer keys, so the peaks become pairs."""
        return asdict(self) | {"peaks": [[size, peak] for size, peak in self.peaks.items()]}

    @classmethod
    def from_state(cls, state: StateDict) -> MemoryLimit:
        return cls(**{**state, "peaks": {int(size): float(peak) for size, peak in state["peaks"]}})


@dataclass(frozen=True)
class Situation:
    """Input of a choice; sizes are given by index."""

    posterior: Posterior
    measured: Measurements
    settings: BackPressureSection  # the TOML table
    sizes: tuple[int, ...]  # ascending
    value: Floats  # expected log objective per size
    highest: int  # the largest size that fits in memory
    current: int  # the size that just ran
    limit: float  # the largest size up to throttle_margin x p*, infinite while p* is unknown


@dataclass
class Explorer:
    """State of the exploration."""

    warming: bool = True
    warmup_steps: int = 0
    steps_since_probe: int = 0
    probe_interval: float = PROBE_FIRST
    purpose: Purpose = "warmup"

    def restart(self) -> None:
        self.warming, self.warmup_steps = True, 0
        self.steps_since_probe, self.probe_interval = 0, PROBE_FIRST

    def choose(self, at: Situation) -> int:
        """Return the index of the size to run next, and set `purpose`."""
        self.warmup_steps += 1
        doubled = min(bisect_right(at.sizes, 2 * at.sizes[at.current]) - 1, at.highest)
        if self.warming and self.warmup_steps <= at.settings.warmup_steps and doubled > at.current:
            hope = float(at.value[doubled]) + SHAPE_OPTIMISM * math.sqrt(at.posterior.shape_variance[doubled])
            if hope > at.value[at.current] + WARMUP_GAIN:
                self.purpose = "warmup"
                return doubled
        self.warming = False
        best = _operating_point(at)
        probe = self._probe(at, best)
        self.purpose = "operate" if probe is None else "probe"
        return best if probe is None else probe

    def _probe(self, at: Situation, best: int) -> int | None:
        """Return a size that may be better than predicted, when a probe is due; else None.

        Probes find changes that the steps at the operating point do not show.
        """
        self.steps_since_probe += 1
        if self.steps_since_probe < self.probe_interval:
            return None
        self.steps_since_probe = 0
        self.probe_interval = min(self.probe_interval * PROBE_GROWTH, PROBE_LAST)
        noise = at.measured.noise_variance / np.maximum(at.measured.count, 1.0)
        variance = at.posterior.shape_variance + at.posterior.own_variance + noise
        hope = at.value + PROBE_OPTIMISM * np.sqrt(variance)
        hope[at.value < at.value[best] - PROBE_LOSS] = -math.inf
        hope[best] = -math.inf
        index = int(hope[: at.highest + 1].argmax())
        return index if hope[index] > -math.inf else None


def _operating_point(at: Situation) -> int:
    """Return the best size, within the limit if that costs little; the current one unless a change pays."""
    optimism = SHAPE_OPTIMISM * np.sqrt(at.posterior.shape_variance)
    optimism = optimism + OWN_OPTIMISM * np.sqrt(at.posterior.own_variance)
    hope = (at.value + optimism)[: at.highest + 1]
    index = int(hope.argmax())
    limit_index = nearest(at.sizes, at.limit)
    if index > limit_index:
        below = int(hope[: limit_index + 1].argmax())
        # the log loss of running at margin x p* on the sharpest curve of the law (no contention); where
        # the sizes below the limit lose more, they are too far apart or the fitted p* is too low
        margin = at.settings.throttle_margin
        margin_cost = math.log((1.0 + margin * margin) / (2.0 * margin))
        if at.value[index] - at.value[below] < margin_cost:
            index = below
    if at.current > at.highest or at.current > limit_index >= index:
        return index
    if index > at.current > limit_index:
        return at.current
    needed = INCREASE_GAIN if index > at.current else THROTTLE_GAIN
    pays = hope[index] - hope[at.current] >= needed
    far_below = at.sizes[at.current] < at.settings.increase_margin * at.limit < math.inf
    return index if pays or (far_below and index > at.current) else at.current


def classify(
    size: float, following: int, purpose: Purpose, over_fit: float, *, is_above: bool
) -> tuple[Action, Regime]:
    """Return the action and the regime of a completed step of `size`, after which `following` is run.

    `over_fit` is measured over fitted throughput at `size`, 1 without a fit; `is_above` is whether `size`
    exceeds throttle_margin x p*.
    """
    if purpose == "warmup":
        return "hold", "warmup"
    if purpose == "operate" and following < size:
        return "throttle", "retrograde"
    if purpose == "operate" and following > size:
        return "increase", "compute_bound"
    if is_above:
        return "hold", "retrograde"
    if over_fit > HEADROOM:
        return "hold", "memory_bound"
    return "hold", "compute_bound" if over_fit < SHORTFALL else "optimal"


PER_DOUBLING = 8  # steps of 6 to 12 %; near its maximum a scalability curve changes by under 1 % per step


def batch_sizes(
    lowest: int, highest: int, configured: int, sizes_wanted: Iterable[int] | None = None
) -> tuple[int, ...]:
    """Return the candidate sizes within the bounds, always with the bounds and the configured size."""
    if sizes_wanted is None:  # every size up to 16, then multiples of powers of two
        strides = (1 << power for power in range(highest.bit_length()))
        sizes_wanted = {stride * eighth for stride in strides for eighth in range(1, 2 * PER_DOUBLING + 1)}
    sizes = {lowest, highest, configured, *sizes_wanted}
    return tuple(sorted(size for size in sizes if lowest <= size <= highest))


def nearest(sizes: tuple[int, ...], size: float) -> int:
    """Return the index of the size whose ratio to `size` is nearest 1; the last for infinity."""
    if math.isinf(size):
        return len(sizes) - 1
    above = bisect_right(sizes, size)
    if above in (0, len(sizes)):
        return min(above, len(sizes) - 1)
    return above if size * size > sizes[above - 1] * sizes[above] else above - 1
