"""Cutting of a step's samples into micro-batches, in which a prompt is run once where that saves enough.

Completions of a group then attend to the states of their prompt: prompts and completions are laid out in one
row, so that everything but attention meets each token once. The gradient reaches a prompt through all of its
completions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from retrain.backends.engines import Ids
from retrain.backends.local.kv_cache import attending
from retrain.backends.local.loading import Policy
from retrain.backends.objective import TokenData
from retrain.base.rollouts import Prompt, TrainingSample

WORTH = 0.8  # prompts are shared if this part of the tokens is left, because attention with a mask is slower
ATTENTION = "retrain-shared-prompts"  # name of this module's attention in transformers
COPIED = 1 / 16  # of a token's memory: a prompt's keys and values, which each of its completions copies

Ints = NDArray[np.int64]
# token ids, and the states that predict the first and the second token of each sequence
Rows = tuple[list[list[int]], Ints, Ints]


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Whole sequences, each without its last token: one per row, or in one row that is laid out."""

    input_ids: torch.Tensor  # (sequences, longest), right-padded; (1, tokens) with a layout
    sources: torch.Tensor  # (tokens,) index of the flattened hidden state that predicts each token
    targets: torch.Tensor  # (tokens,)
    data: TokenData
    samples: Sequence[TrainingSample]
    tokens: int  # that are read, without padding
    layout: Layout | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Sequence:
    sample: TrainingSample
    prompt: Ids
    read: Ids  # after the prompt; the last token predicts nothing
    places: Sequence[int]  # of the sampled tokens

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.read)


@dataclass(frozen=True, slots=True)
class _Extent:
    """Size of a micro-batch, and the longest of each kind."""

    sequences: int = 0
    prompts: int = 0
    prompt: int = 0
    completion: int = 0
    longest: int = 0

    def plus(self, sequence: _Sequence, *, is_new: bool) -> _Extent:
        return _Extent(
            self.sequences + 1,
            self.prompts + is_new,
            max(self.prompt, len(sequence.prompt)),
            max(self.completion, len(sequence.read)),
            max(self.longest, sequence.length),
        )

    def is_shared(self, most: int) -> bool:
        shared = self.prompts * self.prompt + self.sequences * self.completion
        return (
            self.completion > 0 and self.longest <= most and shared <= WORTH * self.sequences * self.longest
        )

    def size(self, most: int) -> float:
        """Return the number of tokens that take as much memory, padding included."""
        if not self.is_shared(most):
            return self.sequences * self.longest
        copied = COPIED * self.sequences * self.prompt
        return self.prompts * self.prompt + self.sequences * self.completion + copied


class _Part:
    """A micro-batch in the making."""

    def __init__(self) -> None:
        self.extent = _Extent()
        self.sequences: list[_Sequence] = []
        self.prompts: dict[Ids, int] = {}

    def grown(self, sequence: _Sequence) -> _Extent:
        return self.extent.plus(sequence, is_new=sequence.prompt not in self.prompts)

    def add(self, sequence: _Sequence) -> None:
        self.extent = self.grown(sequence)
        self.sequences.append(sequence)
        self.prompts.setdefault(sequence.prompt, len(self.prompts))

    def whole(self) -> Rows:
        rows = _padded((*sequence.prompt, *sequence.read) for sequence in self.sequences)
        lasts = np.array([len(sequence.prompt) - 1 for sequence in self.sequences])
        lasts += self.extent.longest * np.arange(len(rows))
        return rows, lasts, lasts + 1

    def shared(self) -> Rows:
        """Return one row, as it is laid out."""
        width, length = self.extent.prompt, self.extent.completion
        row = chain(*_padded(self.prompts), *_padded(sequence.read for sequence in self.sequences))
        prompts = [sequence.prompt for sequence in self.sequences]
        lasts = [len(prompt) - 1 + width * self.prompts[prompt] for prompt in prompts]
        firsts = len(self.prompts) * width + length * np.arange(len(lasts))
        return [[*row]], np.array(lasts), firsts


def lay_out(
    samples: Sequence[TrainingSample],
    prompts: Mapping[Prompt, Ids],
    budget: int,
    policy: Policy,
    most_shared: int = 0,
) -> list[MicroBatch]:
    """Return samples as micro-batches of `budget` tokens, or of one sequence.

    Samples of similar lengths are put together, or those of a prompt, whichever leaves fewer tokens to run.

    Args:
        most_shared: longest sequence of which the prompt can be shared; 0: none.
    """
    sequences = []
    for sample in samples:
        read, places = sample.rollout.placed()
        sequences.append(_Sequence(sample, prompts[sample.rollout.prompt], tuple(read[:-1]), places))
    drafts = [_cut(sorted(sequences, key=lambda one: -one.length), budget, most_shared)]
    if most_shared:
        groups: dict[Ids, list[_Sequence]] = {}
        for sequence in sequences:
            groups.setdefault(sequence.prompt, []).append(sequence)
        ordered = [sorted(group, key=lambda one: -one.length) for group in groups.values()]
        ordered.sort(key=lambda group: -group[0].length)
        drafts.append(_cut(chain.from_iterable(ordered), budget, most_shared))
    parts = min(drafts, key=lambda parts: sum(part.extent.size(most_shared) for part in parts))
    return [_micro_batch(part, policy, is_shared=part.extent.is_shared(most_shared)) for part in parts]


def _cut(sequences: Iterable[_Sequence], budget: int, most_shared: int) -> list[_Part]:
    parts: list[_Part] = []
    for sequence in sequences:
        if not parts or parts[-1].grown(sequence).size(most_shared) > budget:
            parts.append(_Part())
        parts[-1].add(sequence)
    return parts


def _micro_batch(part: _Part, policy: Policy, *, is_shared: bool) -> MicroBatch:
    sequences, device = part.sequences, policy.device
    rows, lasts, firsts = part.shared() if is_shared else part.whole()
    prompts, layout = [one.prompt for one in sequences], None
    if is_shared:
        owners, prompts = [part.prompts[prompt] for prompt in prompts], [*part.prompts]
        layout = Layout.of([*map(len, prompts)], owners, part.extent.completion, policy)
    data = TokenData.of([one.sample for one in sequences])
    places = np.fromiter(chain.from_iterable(one.places for one in sequences), np.int64)
    # each token is predicted by the previous state, the first one by its prompt's last
    sources = np.where(places == 0, lasts[data.sequence], firsts[data.sequence] + places - 1)
    targets = chain.from_iterable(one.sample.rollout.tokens for one in sequences)
    return MicroBatch(
        input_ids=torch.tensor(rows, device=device),
        sources=torch.as_tensor(sources, device=device),
        targets=torch.tensor([*targets], device=device),
        data=data,
        samples=[one.sample for one in sequences],
        tokens=sum(map(len, prompts)) + sum(one.sample.rollout.length for one in sequences),
        layout=layout,
    )


def _padded(sequences: Iterable[Ids]) -> list[list[int]]:
    """Return sequences padded on the right to the longest."""
    rows = [*map(list, sequences)]
    longest = max(map(len, rows))
    return [row + [0] * (longest - len(row)) for row in rows]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """One row of prompts and then completions, each padded on the right to the longest of its kind."""

    prompts: int
    cut: int  # tokens of all prompts
    owners: torch.Tensor  # (completions,) each one's prompt
    positions: torch.Tensor  # (1, tokens) of each token in its sequence
    mask: torch.Tensor  # (completions, or 1 for all, 1, their length, length with the prompt): 0 or -infinity

    @classmethod
    def of(cls, prompts: Sequence[int], owners: Sequence[int], length: int, policy: Policy) -> Layout:
        """Return the layout of prompts of these lengths, and of a completion for each owner."""
        device, dtype, longest = policy.device, policy.causal.dtype, max(prompts)
        begins = torch.tensor([prompts[owner] for owner in owners], device=device)[:, None]
        columns, steps = torch.arange(longest, device=device), torch.arange(length, device=device)
        positions = torch.cat([columns.repeat(len(prompts)), (begins + steps).flatten()])
        is_padding = (columns >= (begins if min(prompts) < longest else begins[:1]))[:, None]
        is_later = (steps > steps[:, None])[None]
        shape = (len(is_padding), length, -1)
        is_hidden = torch.cat([is_padding.expand(shape), is_later.expand(shape)], dim=2)[:, None]
        mask = torch.zeros(is_hidden.shape, dtype=dtype, device=device).masked_fill_(is_hidden, -torch.inf)
        return cls(
            len(prompts), len(prompts) * longest, torch.tensor(owners, device=device), positions[None], mask
        )


def states_of(policy: Policy, input_ids: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the last hidden states of a row that is laid out so: (1, tokens, hidden)."""
    with attending(policy.causal.config.get_text_config(), ATTENTION):
        output = policy.body(
            input_ids=input_ids, position_ids=layout.positions, use_cache=False, layout=layout
        )
    states: torch.Tensor = output.last_hidden_state
    return states


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: None,
    *,
    layout: Layout,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: of prompts to themselves, of completions also to their prompt."""
    del module, mask, kwargs
    if softcap is not None:
        raise ValueError("scores with a cap are not computed by this attention")
    (prompt_queries, queries), (keys, own_keys), (values, own_values) = (
        _apart(states, layout) for states in (query, key, value)
    )
    grouped = query.shape[1] != key.shape[1]
    of_prompts = scaled_dot_product_attention(
        prompt_queries, keys, values, is_causal=True, scale=scaling, enable_gqa=grouped
    )
    keys = torch.cat([keys.index_select(0, layout.owners), own_keys], dim=2)
    values = torch.cat([values.index_select(0, layout.owners), own_values], dim=2)
    if grouped and query.device.type != "cpu":  # there, a mask and shared heads have no fast kernel
        count = query.shape[1] // key.shape[1]
        keys, values = keys.repeat_interleave(count, 1), values.repeat_interleave(count, 1)
        grouped = False
    of_completions = scaled_dot_product_attention(
        queries, keys, values, attn_mask=layout.mask, scale=scaling, enable_gqa=grouped
    )
    parts = [states.transpose(1, 2).flatten(0, 1) for states in (of_prompts, of_completions)]
    return torch.cat(parts)[None], None


def _apart(states: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states of prompts and of completions: (1, heads, tokens, width) -> (n, heads, ..., width)."""
    heads = states[0]
    prompts, completions = heads[:, : layout.cut], heads[:, layout.cut :]
    return (
        prompts.unflatten(1, (layout.prompts, -1)).transpose(0, 1),
        completions.unflatten(1, (len(layout.owners), -1)).transpose(0, 1),
    )


AttentionInterface.register(ATTENTION, attend)
