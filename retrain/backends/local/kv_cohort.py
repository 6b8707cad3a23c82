"""Rows of similar length: one buffer of keys and one of values per layer, aligned at the last token.

All rows grow by one token per step, so they stay aligned, and a step writes one column. A row that ends is
replaced by the last one, so no place is ever empty. A layer with a sliding window keeps the columns that the
next token attends to, not the whole length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from transformers import DynamicCache

from retrain.backends.engines import Ids
from retrain.backends.local.loading import Policy
from retrain.backends.rows import Row

PREFILL_TOKENS = 16384  # prompts run together, including padding
GROWTH, LEAST_ROOM = 1.25, 32  # at most a quarter of a buffer is unused; a token is copied about five times


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The cache of one sequence, and the state that predicts its next token."""

    ids: Ids
    # keys and values, each (1, heads, length, width); of layers with a window, what is left of the length
    layers: list[tuple[torch.Tensor, torch.Tensor]]
    hidden: torch.Tensor  # (1, hidden)

    def copy(self) -> Prefix:
        """Return a copy that does not keep the other sequences of its batch in memory."""
        return Prefix(self.ids, [(k.clone(), v.clone()) for k, v in self.layers], self.hidden.clone())


def prefill(
    policy: Policy, sequences: Sequence[Ids], device: torch.device, windows: Sequence[int]
) -> dict[Ids, Prefix]:
    """Run sequences, several at a time; padding is on the right and attention is causal, as in training."""
    found: dict[Ids, Prefix] = {}
    waiting = sorted(sequences, key=len)
    while waiting:
        count = max(1, PREFILL_TOKENS // len(waiting[-1]))
        part, waiting = waiting[-count:], waiting[:-count]
        longest = len(part[-1])
        padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in part], device=device)
        cache = DynamicCache()
        states = policy.run_cached(cache, padded).last_hidden_state
        for place, ids in enumerate(part):
            layers = []
            for layer, window in zip(cache.layers, windows, strict=True):
                cut = (slice(place, place + 1), slice(None), slice(max(0, len(ids) - window), len(ids)))
                layers.append((layer.keys[cut], layer.values[cut]))
            found[ids] = Prefix(ids, layers, states[place : place + 1, len(ids) - 1])
    return found


@dataclass(slots=True, eq=False)
class Strip:
    """One layer's keys and values: places by columns, of which the first has the number `begin`."""

    window: int
    pair: list[torch.Tensor]  # (places, heads, columns, width) each
    begin: int

    def kept(self, first: int, end: int) -> int:
        """Return the first column that the token in column `end` attends to, of those from `first`."""
        return max(first, end + 1 - self.window)

    def cut(self, count: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of the first places, in these columns."""
        keys, values = (buffer[:count, :, first - self.begin : end - self.begin] for buffer in self.pair)
        return keys, values

    def make_room(self, places: int, left: int, right: int, first: int, end: int, count: int) -> None:
        """Copy the buffers unless they have so many places, and columns left of `end` and right of it.

        The columns from `first` of `count` places are in use; a window limits the columns on the left.
        """
        left = min(max(left, end - first), self.window)
        have_places, _, columns, _ = self.pair[0].shape
        if places <= have_places and self.begin <= end - left and end + right <= self.begin + columns:
            return
        used = self.cut(count, self.kept(first, end), end)
        self.begin, columns = end - left, int(left * GROWTH) + LEAST_ROOM + right
        for which, states in enumerate(used):
            # zeros, because an attention of zero times a NaN is NaN
            new = states.new_zeros(places, states.shape[1], columns, states.shape[3])
            new[:count, :, left - states.shape[2] : left] = states
            self.pair[which] = new


class Cohort:
    """Rows aligned at their last token: places in one buffer of keys and one of values per layer.

    Columns are numbered from the first token of the first rows' longest; rows that join later may begin
    before it.
    """

    def __init__(self, rows: Sequence[Row], prefixes: Sequence[Prefix], windows: Sequence[int]) -> None:
        """Copy each row's prefix, one per row, into new buffers."""
        self.rows = list(rows)
        self._start: torch.Tensor | None = None
        self.end = max(len(prefix.ids) for prefix in prefixes)  # column after the last token
        self._moved([self.end - len(prefix.ids) for prefix in prefixes])
        self.hidden = torch.cat([prefix.hidden for prefix in prefixes])
        runs = [(prefix, len(list(same))) for prefix, same in groupby(prefixes)]
        self._strips = [self._filled(runs, layer, window) for layer, window in enumerate(windows)]
        self.mask: torch.Tensor | None = None

    def _filled(self, runs: Sequence[tuple[Prefix, int]], layer: int, window: int) -> Strip:
        width = min(self.end, window)
        pair = []
        for which in (0, 1):
            states = runs[0][0].layers[layer][which]
            buffer = states.new_zeros(len(self.rows), states.shape[1], width + LEAST_ROOM, states.shape[3])
            place = 0
            for prefix, count in runs:
                states = prefix.layers[layer][which]
                buffer[place : place + count, :, width - states.shape[2] : width] = states
                place += count
            pair.append(buffer)
        return Strip(window, pair, self.end - width)

    @property
    def width(self) -> int:
        return self.end - self.first

    @property
    def start(self) -> torch.Tensor:
        """First column of each row, on the device."""
        if self._start is None:
            self._start = torch.tensor(self.starts, device=self.hidden.device)
        return self._start

    def absorb(self, other: Cohort) -> None:
        """Take over another cohort's rows."""
        count, more = len(self.rows), len(other.rows)
        total = count + more
        if total > len(self._strips[0].pair[0]):
            total += total // 4  # rows come one at a time
        for mine, theirs in zip(self._strips, other._strips, strict=True):
            mine.make_room(total, other.width, 0, self.first, self.end, count)
            states = theirs.cut(more, theirs.kept(other.first, other.end), other.end)
            first = self.end - states[0].shape[2]
            for place, source in zip(mine.cut(total, first, self.end), states, strict=True):
                place[count : count + more] = source
        self.rows += other.rows
        self._moved([*self.starts, *(start - other.end + self.end for start in other.starts)])
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
            for strip in self._strips:
                for states in strip.cut(len(self.rows), strip.kept(self.first, self.end), self.end):
                    states[holes] = states[moved]
        self.rows = [self.rows[place] for place in order]
        self.hidden = self.hidden[order]
        self._moved([self.starts[place] for place in order])
        return order

    def _moved(self, starts: list[int]) -> None:
        self.starts = starts
        self.first = min(starts, default=self.end)
        self._start = None

    def begin(self) -> None:
        """Prepare the column of the next token."""
        for strip in self._strips:
            strip.make_room(len(self.rows), 0, 1, self.first, self.end, len(self.rows))
        self.mask = None
        if max(self.starts) > self.first:
            columns = torch.arange(self.first, self.end + 1, device=self.hidden.device)
            self.mask = (columns >= self.start[:, None])[:, None, None]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        places = self._strips[layer].cut(len(self.rows), self.end, self.end + 1)
        for place, states in zip(places, (keys, values), strict=True):
            place.copy_(states)

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return keys, values and the mask, (rows, 1, 1, columns), of what the next token attends to."""
        strip = self._strips[layer]
        first = strip.kept(self.first, self.end)
        keys, values = strip.cut(len(self.rows), first, self.end + 1)
        return keys, values, None if self.mask is None else self.mask[..., first - self.first :]
