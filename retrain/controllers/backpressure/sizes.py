"""Which batch sizes are worth telling apart: eight per doubling, which are also the sizes kernels like."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator

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
