"""Which batch sizes are worth telling apart: eight per doubling, which are also the sizes kernels like."""

from __future__ import annotations

import math
from bisect import bisect_right

PER_DOUBLING = 8  # steps of 6 to 12 %; a scalability curve moves under 1 % between neighbours at its top


def batch_sizes(lowest: int, highest: int, configured: int) -> tuple[int, ...]:
    """Every size up to 16, then multiples of a power of two, with the bounds and the configured size."""
    sizes = {lowest, highest, configured, *range(1, 2 * PER_DOUBLING + 1)}
    stride = 2
    while stride * PER_DOUBLING < highest:
        sizes.update(stride * eighth for eighth in range(PER_DOUBLING + 1, 2 * PER_DOUBLING + 1))
        stride *= 2
    return tuple(sorted(size for size in sizes if lowest <= size <= highest))


def nearest(sizes: tuple[int, ...], size: float) -> int:
    """Index of the size whose ratio to `size` is nearest 1; the last for infinity."""
    if math.isinf(size):
        return len(sizes) - 1
    above = bisect_right(sizes, size)
    if above in (0, len(sizes)):
        return min(above, len(sizes) - 1)
    return above if size * size > sizes[above - 1] * sizes[above] else above - 1
