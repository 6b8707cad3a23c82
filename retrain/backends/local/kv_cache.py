"""Key-value cache for rows that begin and end at any time, with one forward pass over all of them.

Rows of similar length are a cohort: one buffer of keys and one of values per layer, aligned at the last
token. The model runs all cohorts together, and only attention runs cohort by cohort. As all rows grow by one
token per step, the relative difference of their lengths shrinks: cohorts are merged as soon as they are
similar. A row that ends is replaced by the last one, so no place is ever empty. A model whose cache cannot be
split so runs a `Pass`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

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
    prefixes: dict[Ids, Prefix] = {}
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
            prefixes[ids] = Prefix(ids, layers, states[place : place + 1, len(ids) - 1])
    return prefixes


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


ATTENTION = "retrain-cohorts"  # name of this module's attention in transformers
SPREAD, SLACK = 1.25, 32  # cohorts are merged if the wider one's rows are at most this much longer
DEAD_SHARE = 0.25  # finished rows are dropped once they are this fraction of a cache that none joins


@dataclass(frozen=True, slots=True)
class Windows:
    """How a model attends to its cache."""

    of_layers: tuple[int, ...]  # most tokens that each layer attends to
    is_whole: bool = False  # it computes attention by itself, for all rows at once, padded to the longest


class Cohorts:
    """The rows that a policy is sampling, in the order of the batch; implements the sampler's cache."""

    def __init__(self, policy: Policy, windows: Windows, device: torch.device) -> None:
        self._policy = policy
        self._config = policy.causal.config.get_text_config()
        self._device = device
        self._cohorts: list[Cohort] = []
        self._prefixes: dict[Ids, Prefix] = {}
        self._windows = windows
        kind, count = self._config._attn_implementation, len(windows.of_layers)
        layers = [_Layer(self._cohorts, number, kind, windows.is_whole) for number in range(count)]
        self._layers = Cache(layers=layers)

    @property
    def rows(self) -> list[Row]:
        return [row for cohort in self._cohorts for row in cohort.rows]

    @property
    def hidden(self) -> torch.Tensor:
        return torch.cat([cohort.hidden for cohort in self._cohorts])

    @property
    def cells(self) -> int:
        """Tokens that the cache has room for, padding included."""
        widths = [(1, len(ids)) for ids in self._prefixes]
        widths += [(len(cohort.rows), cohort.width) for cohort in self._cohorts]
        return sum(count * cells_of(self._windows, width) for count, width in widths)

    def admit(self, rows: Sequence[Row], following: Ids | None) -> list[int]:
        """Add rows; return the lengths of the sequences that were run, each once.

        The cache of `following`, the sequence that is admitted next, is kept if it is known.
        """
        if not rows:
            self._merge()
            return []
        sequences = [row.ids for row in rows]
        fresh = [ids for ids in dict.fromkeys(sequences) if ids not in self._prefixes]
        self._prefixes |= prefill(self._policy, fresh, self._device, self._windows.of_layers)
        prefixes = [self._prefixes[ids] for ids in sequences]
        self._cohorts.append(Cohort(rows, prefixes, self._windows.of_layers))
        self._prefixes = {ids: p.copy() for ids, p in self._prefixes.items() if ids == following}
        self._merge()
        return [len(ids) for ids in fresh]

    def _merge(self) -> None:
        self._cohorts.sort(key=lambda cohort: cohort.width)
        for narrow, wide in pairwise(self._cohorts):
            if self._windows.is_whole or wide.width <= SPREAD * narrow.width + SLACK:
                larger, smaller = (narrow, wide) if len(narrow.rows) > len(wide.rows) else (wide, narrow)
                larger.absorb(smaller)
                self._cohorts.remove(smaller)
                self._merge()
                return

    def keep(self, kept: Sequence[int]) -> list[int]:
        """Drop all but these rows of the batch; return for each row left its earlier index."""
        is_kept, order, begin = set(kept), [], 0
        for cohort in self._cohorts:
            count = len(cohort.rows)
            places = [place for place in range(count) if begin + place in is_kept]
            order += [begin + place for place in (cohort.keep(places) if len(places) < count else places)]
            begin += count
        self._cohorts[:] = [cohort for cohort in self._cohorts if cohort.rows]
        return order

    def advance(self, tokens: torch.Tensor) -> None:
        """Run one token of each row of the batch."""
        for cohort in self._cohorts:
            cohort.begin()
        positions = torch.cat([cohort.end - cohort.start for cohort in self._cohorts])
        whole = self._windows.is_whole
        mask = self._cohorts[0].mask if whole else None
        with nullcontext() if whole else attending(self._config, ATTENTION):
            output = self._policy.run_cached(
                self._layers,
                tokens[:, None],
                attention_mask=None if mask is None else mask[:, 0, 0].long(),
                position_ids=positions[:, None],
            )
        states = output.last_hidden_state[:, -1].split([len(cohort.rows) for cohort in self._cohorts])
        for cohort, hidden in zip(self._cohorts, states, strict=True):
            cohort.hidden = hidden
            cohort.end += 1


def cells_of(windows: Windows | None, length: int) -> int:
    """Return how many tokens of a cache in all layers a row of this length takes."""
    if windows is None or length <= min(windows.of_layers):
        return length
    return -(-sum(min(length, window) for window in windows.of_layers) // len(windows.of_layers))


def windows_of(policy: Policy) -> Windows | None:
    """Return each layer's attention window, or None if its cache or attention is of another kind."""
    config = policy.causal.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or []
    if config._attn_implementation not in ("sdpa", "eager") or "chunked_attention" in kinds:
        return None
    layers = DynamicCache(config=config).layers
    if not layers or any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        return None
    return Windows(tuple(getattr(layer, "sliding_window", sys.maxsize) for layer in layers))


class _Layer(DynamicLayer):  # type: ignore[misc]  # Any if type-checked without transformers
    """One layer's cache, as transformers sees it: writes states and passes on where they are."""

    def __init__(self, cohorts: list[Cohort], number: int, kind: str, is_whole: bool) -> None:
        super().__init__()
        self._cohorts, self._number, self._kind, self._is_whole = cohorts, number, kind, is_whole

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states; return them for `attend`, or all there are to a model that attends by itself."""
        del args, kwargs
        sizes = [len(cohort.rows) for cohort in self._cohorts]
        states = zip(self._cohorts, key_states.split(sizes), value_states.split(sizes), strict=True)
        for cohort, keys, values in states:
            cohort.write(self._number, keys, values)
        if self._is_whole:
            return self._cohorts[0].read(self._number)[:2]
        key_states.cohorts = self
        return key_states, value_states

    def attend(self, module: torch.nn.Module, query: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return (rows, 1, heads, width)."""
        attention = (
            _grouped if self._kind == "sdpa" else sys.modules[type(module).__module__].eager_attention_forward
        )
        outputs, place = [], 0
        for cohort in self._cohorts:
            part = query[place : place + len(cohort.rows)]
            keys, values, mask = cohort.read(self._number)
            if mask is not None and self._kind == "eager":
                mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(
                    ~mask, torch.finfo(query.dtype).min
                )
            outputs.append(attention(module, part, keys, values, mask, **kwargs)[0])
            place += len(part)
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def get_seq_length(self) -> int:
        return max((cohort.width for cohort in self._cohorts), default=0)


@contextmanager
def attending(config: Any, name: str) -> Iterator[None]:
    """Run attention by a function that is registered with transformers; no mask is made."""
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it; keys and values are read from the cohorts."""
    del value, mask
    return key.cohorts.attend(module, query, **kwargs), None


def _grouped(
    module: torch.nn.Module,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor]:
    """Attention of one token per row; query heads that share keys are run as rows, so nothing is copied."""
    del module, kwargs
    rows, heads = keys.shape[:2]
    packed = query.reshape(rows, heads, -1, query.shape[-1])
    output = scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scaling)
    return (output.reshape(rows, 1, -1, values.shape[-1]),)


AttentionInterface.register(ATTENTION, attend)


class Pass:
    """Rows that began together, finished ones included; implements the sampler's cache.

    For models whose cache cannot be split by rows: none is added. Each distinct prompt is run once,
    left-padded with the others; its cache is copied to the rows of its group.
    """

    def __init__(self, policy: Policy, device: torch.device) -> None:
        self._policy, self._device = policy, device
        self.rows: list[Row] = []

    @property
    def cells(self) -> int:
        """Zero: rows are admitted by their full length, so they never outgrow the cache."""
        return 0

    def admit(self, rows: Sequence[Row], following: Ids | None) -> list[int]:
        del following
        if not rows:
            return []
        distinct = {ids: number for number, ids in enumerate(dict.fromkeys(row.ids for row in rows))}
        longest = max(map(len, distinct))
        padded = [[0] * (longest - len(ids)) + list(ids) for ids in distinct]
        lengths = torch.tensor([len(ids) for ids in distinct], device=self._device)
        mask = (torch.arange(longest, device=self._device) >= (longest - lengths)[:, None]).long()
        self._mask = mask if min(map(len, distinct)) < longest else None
        self._cache = DynamicCache(config=self._policy.causal.config)
        hidden = self._policy.run_cached(
            self._cache,
            torch.tensor(padded, device=self._device),
            attention_mask=self._mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        ).last_hidden_state[:, -1]
        self._position, self.hidden, self.rows = lengths, hidden, []
        self._select(torch.tensor([distinct[row.ids] for row in rows], device=self._device))
        self.rows = list(rows)
        return list(map(len, distinct))

    def keep(self, kept: Sequence[int]) -> list[int]:
        """Drop all but these rows if that saves enough; return for each row left its earlier index."""
        count = len(self.rows)
        if kept and len(kept) > (1 - DEAD_SHARE) * count:
            return list(range(count))
        self.rows = [self.rows[place] for place in kept]
        if kept:
            self._select(torch.tensor(kept, device=self._device))
        return list(kept)

    def _select(self, chosen: torch.Tensor) -> None:
        self._cache.reorder_cache(chosen)
        self._position, self.hidden = self._position[chosen], self.hidden[chosen]
        self._mask = None if self._mask is None else self._mask[chosen]

    def advance(self, tokens: torch.Tensor) -> None:
        if self._mask is not None:
            self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        self.hidden = self._policy.run_cached(
            self._cache, tokens[:, None], attention_mask=self._mask, position_ids=self._position[:, None]
        ).last_hidden_state[:, -1]
        self._position = self._position + 1
