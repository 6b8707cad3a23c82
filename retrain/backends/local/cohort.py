"""Rows of similar length: one buffer of keys and one of values per layer, aligned at the last token.

All rows grow by one token per step, so they stay aligned, and a step writes one column. A row that ends is
replaced by the last one, so no place is ever empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from retrain.backends.local.rows import Row
from retrain.engines import Ids

GROWTH, LEAST_ROOM = 1.25, 32  # at most a quarter of a buffer is unused; a token is copied about five times


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The cache of one sequence, and the state that predicts its next token."""

    ids: Ids
    layers: list[tuple[torch.Tensor, torch.Tensor]]  # keys and values, each (1, heads, length, width)
    hidden: torch.Tensor  # (1, hidden)


class Cohort:
    """Rows aligned at their last token: places in one buffer of keys and one of values per layer."""

    def __init__(self, rows: Sequence[Row], prefixes: Sequence[Prefix]) -> None:
        """Copy each row's prefix, one per row, into new buffers."""
        self.rows = list(rows)
        self._start: torch.Tensor | None = None
        self.end = max(len(prefix.ids) for prefix in prefixes)  # column after the last token
        self._moved([self.end - len(prefix.ids) for prefix in prefixes], self.end)
        self.hidden = torch.cat([prefix.hidden for prefix in prefixes])
        runs = [(prefix, len(list(same))) for prefix, same in groupby(prefixes)]
        self.buffers = [
            [self._filled(runs, layer, which) for which in (0, 1)] for layer in range(len(prefixes[0].layers))
        ]
        self.mask: torch.Tensor | None = None

    def _filled(self, runs: Sequence[tuple[Prefix, int]], layer: int, which: int) -> torch.Tensor:
        states = runs[0][0].layers[layer][which]
        heads, _, width = states.shape[1:]
        # zeros, because an attention of zero times a NaN is NaN
        buffer = states.new_zeros(len(self.rows), heads, self.end + LEAST_ROOM, width)
        place = 0
        for prefix, count in runs:
            buffer[place : place + count, :, self.end - len(prefix.ids) : self.end] = prefix.layers[layer][
                which
            ]
            place += count
        return buffer

    @property
    def width(self) -> int:
        return self.end - self.first

    @property
    def start(self) -> torch.Tensor:
        """First column of each row, on the device."""
        if self._start is None:
            self._start = torch.tensor(self.starts, device=self.hidden.device)
        return self._start

    def make_room(self, places: int, left: int, right: int) -> None:
        """Copy the buffers unless they have so many places, and columns left of the end and right of it."""
        buffer = self.buffers[0][0]
        if places <= len(buffer) and left <= self.end and self.end + right <= buffer.shape[2]:
            return
        first, count, width = self.first, len(self.rows), self.width
        shift = max(left, width) - width - first
        columns = int(max(left, width) * GROWTH) + LEAST_ROOM + right
        for pair in self.buffers:
            for which, old in enumerate(pair):
                new = old.new_zeros(places, old.shape[1], columns, old.shape[3])
                new[:count, :, first + shift : self.end + shift] = old[:count, :, first : self.end]
                pair[which] = new
        self._moved([start + shift for start in self.starts], self.end + shift)

    def absorb(self, other: Cohort) -> None:
        """Take over another cohort's rows."""
        count, more = len(self.rows), len(other.rows)
        total = count + more
        if total > len(self.buffers[0][0]):
            total += total // 4  # rows come one at a time
        self.make_room(total, other.width, 0)
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            for buffer, source in zip(mine, theirs, strict=True):
                buffer[count : count + more, :, self.end - other.width : self.end] = source[
                    :more, :, other.first : other.end
                ]
        self.rows += other.rows
        self._moved([*self.starts, *(start - other.end + self.end for start in other.starts)], self.end)
        self.hidden = torch.cat([self.hidden, other.hidden])

    def keep(self, kept: Sequence[int]) -> list[int]:
        """Drop all but these rows; return for each place the row's earlier place."""
        count = len(kept)
        is_kept = set(kept)
        holes = [place for place in range(count) if place not in is_kept]
        moved = [place for place in kept if place >= count]
        order = list(range(count))
        if holes:
            for hole, place in zip(holes, moved, strict=True):
                order[hole] = place
            span = slice(self.first, self.end)
            for pair in self.buffers:
                for buffer in pair:
                    buffer[holes, :, span] = buffer[moved, :, span]
        self.rows = [self.rows[place] for place in order]
        self.hidden = self.hidden[order]
        self._moved([self.starts[place] for place in order], self.end)
        return order

    def _moved(self, starts: list[int], end: int) -> None:
        self.starts, self.end = starts, end
        self.first = min(starts, default=end)
        self._start = None

    def begin(self) -> None:
        """Prepare the column of the next token."""
        self.make_room(len(self.rows), 0, 1)
        self.mask = None
        if max(self.starts) > self.first:
            columns = torch.arange(self.first, self.end + 1, device=self.hidden.device)
            self.mask = (columns >= self.start[:, None])[:, None, None]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        for buffer, states in zip(self.buffers[layer], (keys, values), strict=True):
            buffer[: len(self.rows), :, self.end] = states[:, :, 0]

    def read(self, layer: int, window: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return keys, values and the mask, (rows, 1, 1, columns), of the last `window` columns."""
        first = max(self.first, self.end + 1 - window)
        keys, values = (buffer[: len(self.rows), :, first : self.end + 1] for buffer in self.buffers[layer])
        return keys, values, None if self.mask is None else self.mask[..., first - self.first :]
