"""The largest batch allowed, from sizes that ran out of memory, sizes that fitted, and memory telemetry.

Sizes at or above the smallest that ran out of memory are never allowed again: no later measurement can prove
that they fit. Without telemetry, the batch grows by one size at a time after a failure, since only a failure
costs a step; after the second failure growth stops.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

GROWTH = 2  # limit, times the largest success: memory grows at most proportionally
FAILURES = 2  # allowed while exploring, counted after the first success
WIDE = 1.25  # times the largest success: a gap this wide justifies one more failure
CEILING = 0.95  # memory fraction to stay under; allocators fragment
RETREAT = 0.8  # of a size that fitted before and no longer does
FIRST_RETREAT = 0.5  # of a configured size that never fitted
SPAN = 2.0  # least ratio of two sizes for a linear fit of memory fractions


@dataclass
class MemoryLimit:
    """Memory limits observed so far; sizes in prompts per step."""

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

    def highest(self, sizes: tuple[int, ...]) -> int:
        """Return the index of the largest allowed of `sizes` (ascending); 0 if none is."""
        limit = min(self._reach(sizes), self._predicted())
        return max(0, bisect_right(sizes, limit) - 1)

    def _reach(self, sizes: tuple[int, ...]) -> float:
        if self.failed is None:
            return GROWTH * self.largest
        following = sizes[min(bisect_right(sizes, self.largest), len(sizes) - 1)]
        if self.failures >= FAILURES and following < WIDE * self.largest:
            return min(self.largest, self.failed - 1)
        return min(following, self.failed - 1)

    def _predicted(self) -> float:
        """Return the size at which memory reaches the ceiling; proportional growth is the worst case."""
        if not self.peaks:
            return float("inf")
        smallest, largest = min(self.peaks), max(self.peaks)
        top = self.peaks[largest]
        if largest >= SPAN * smallest:
            slope = max(0.0, (top - self.peaks[smallest]) / (largest - smallest))
        else:
            slope = top / largest
        return largest + (CEILING - top) / slope if slope > 0.0 else float("inf")

    def state(self) -> dict[str, Any]:
        """Return plain data; JSON has no integer keys, so the peaks become pairs."""
        return asdict(self) | {"peaks": [[size, peak] for size, peak in self.peaks.items()]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> MemoryLimit:
        return cls(**{**state, "peaks": {int(size): float(peak) for size, peak in state["peaks"]}})
