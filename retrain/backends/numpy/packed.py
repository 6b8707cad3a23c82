"""Sequences of different lengths laid out for a recurrent network without padding.

Sequences are sorted by length, longest first, and stored time-major: at every time the rows that
are still alive are the first ones, so a step is a plain slice. No padding means no mask, and no
row can leak into another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from retrain.backends.numpy.weights import Ints


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Where each element of each sequence lies in the time-major layout.

    Sequence i of length L_i has L_i states; its element t is what follows state t, so element
    t - 1 is the input that leads to state t, and the last element is an input to nothing.
    """

    elements: Ints  # (total,) sequence after sequence, as given
    position: Ints  # (total,) element -> row in the time-major layout
    sequence: Ints  # (total,) element -> its sequence
    order: Ints  # (sequences,) row at time 0 -> sequence
    offsets: tuple[int, ...]  # (longest + 1,) first row of each time, then the total
    inputs: Ints  # (total,) time-major: the element that leads to each state; rows of time 0 unused

    def steps(self) -> Iterator[tuple[slice, slice]]:
        """Yield (rows before, rows after) of each transition, in time order."""
        for before, after, end in zip(self.offsets, self.offsets[1:], self.offsets[2:], strict=False):
            yield slice(before, before + end - after), slice(after, end)

    def last(self) -> Ints:
        """Return the row of each sequence's last state, in the order given."""
        ends = np.flatnonzero(np.diff(self.sequence, append=-1))
        return self.position[ends]


def pack(sequences: Sequence[Sequence[int]]) -> Packed:
    """Lay out sequences, each of at least one element."""
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    elements = np.fromiter(chain.from_iterable(sequences), np.int64, int(lengths.sum()))
    order = np.argsort(-lengths, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    starts = np.cumsum(lengths) - lengths
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    time = np.arange(len(elements)) - starts[sequence]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(time))])
    position = offsets[time] + rank[sequence]
    inputs = np.empty_like(elements)
    inputs[position] = np.roll(elements, 1)
    return Packed(elements, position, sequence, order, tuple(offsets.tolist()), inputs)
