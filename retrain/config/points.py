"""Points of a sweep: those that a sampler has proposed, or Sobol's, which fill a cube evenly.

Sobol's sequence is shifted by a seed, and the same on every machine. scipy has it too, but is not in the
core, and its scrambling may change with its version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

BITS = 30
# Joe and Kuo's direction numbers (SIAM J. Sci. Comput. 30, 2008), from the second dimension on: the
# coefficients of a primitive polynomial as bits, without the first and the last, and the initial numbers.
DIRECTIONS: tuple[tuple[int, tuple[int, ...]], ...] = (
    (0, (1,)),
    (1, (1, 3)),
    (1, (1, 3, 1)),
    (2, (1, 1, 1)),
    (1, (1, 1, 3, 3)),
    (4, (1, 3, 5, 13)),
    (2, (1, 1, 5, 5, 17)),
    (4, (1, 1, 5, 5, 5)),
    (7, (1, 1, 7, 11, 19)),
    (11, (1, 1, 5, 1, 1)),
    (13, (1, 1, 1, 3, 11)),
    (14, (1, 3, 5, 5, 31)),
    (1, (1, 3, 3, 9, 7, 49)),
    (13, (1, 1, 1, 15, 21, 21)),
    (16, (1, 3, 1, 13, 27, 49)),
)
MOST_DIMENSIONS = len(DIRECTIONS) + 1
Point: TypeAlias = dict[str, Any]  # values by dotted key


@dataclass(frozen=True)
class Proposal:
    """A point that a sampler proposed, of one of the file's conditions."""

    point: Point
    number: int = 1  # of the condition in the file; 1 as well for a file without conditions


def sobol(count: int, dimensions: int, seed: int | None) -> list[tuple[float, ...]]:
    """Return the first points of the sequence in [0, 1), each of so many dimensions.

    A seed shifts all points digit by digit, which keeps them as even as they are; None does not. More points
    begin with the same ones.
    """
    columns = []
    for dimension in range(dimensions):
        shift = 0 if seed is None else _shift(seed, dimension)
        columns.append([(v ^ shift) / 2**BITS for v in _whole_numbers(count, _directions(dimension))])
    return list(zip(*columns, strict=True))


def _whole_numbers(count: int, directions: list[int]) -> Iterator[int]:
    """Iterate over one dimension times 2^BITS, in the order of the Gray code (Antonov and Saleev)."""
    value = 0
    for number in range(1, count + 1):
        yield value
        value ^= directions[(number & -number).bit_length() - 1]


def _directions(dimension: int) -> list[int]:
    if dimension == 0:
        return [1 << (BITS - bit) for bit in range(1, BITS + 1)]
    polynomial, first = DIRECTIONS[dimension - 1]
    degree = len(first)
    found = [number << (BITS - bit) for bit, number in enumerate(first, start=1)]
    for bit in range(degree, BITS):
        value = found[bit - degree] ^ (found[bit - degree] >> degree)
        for k in range(1, degree):
            if polynomial >> (degree - 1 - k) & 1:
                value ^= found[bit - k]
        found.append(value)
    return found


def _shift(seed: int, dimension: int) -> int:
    digits = hashlib.sha256(f"{seed} {dimension}".encode()).digest()
    return int.from_bytes(digits[:4]) >> (32 - BITS)
