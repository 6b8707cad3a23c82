"""How large a batch may be: what ran out of memory, what succeeded, and what memory telemetry predicts.

A size at or above one that ran out of memory is never allowed again: nothing seen later proves that it
would fit. Without telemetry the way up after a failure is one size at a time, because each success is a
normal step and only a failure costs one; after the second failure it ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

GROWTH = 2  # never more than this times the largest success: memory grows at most in proportion
FAILURES = 2  # that exploring may cost, counted from the first success on
WIDE = 1.25  # times the largest success: a gap that is worth one more
CEILING = 0.95  # memory fraction to stay under; allocators fragment
RETREAT = 0.8  # of a size that used to fit and no longer does
FIRST_RETREAT = 0.5  # of a configured size that never did
SPAN = 2.0  # ratio of sizes from which a straight line through memory fractions is trusted


@dataclass
class MemoryLimit:
    """Facts about memory; sizes in prompts per step.

    Attributes:
        largest: the largest success, or the configured size before any.
        succeeded: whether any size fitted yet.
        failed: the smallest failure, None while there is none.
        peaks: size -> the highest memory fraction seen there.
    """

    largest: int
    succeeded: bool = False
    failed: int | None = None
    failures: int = 0
    peaks: dict[int, float] = field(default_factory=dict)

    def fitted(self, size: int, memory_fraction: float | None) -> None:
        """A step of this size succeeded."""
        self.largest = max(self.largest, size)
        self.succeeded = True
        if memory_fraction is not None:
            self.peaks[size] = max(memory_fraction, self.peaks.get(size, 0.0))

    def exhausted(self, size: int) -> None:
        """A step of this size ran out of memory."""
        self.failures += self.succeeded
        self.failed = size if self.failed is None else min(self.failed, size)
        if size <= self.largest:
            self.largest = max(1, int((RETREAT if self.succeeded else FIRST_RETREAT) * size))

    def highest(self, sizes: tuple[int, ...]) -> int:
        """Index of the largest of `sizes` (ascending) worth trying; 0 if none is."""
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
        """Where the memory fraction would reach the ceiling; proportional growth is the worst case."""
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
        """Plain data; JSON has no integer keys, so the peaks become pairs."""
        return asdict(self) | {"peaks": [[size, peak] for size, peak in self.peaks.items()]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> MemoryLimit:
        return cls(**{**state, "peaks": {int(size): float(peak) for size, peak in state["peaks"]}})
