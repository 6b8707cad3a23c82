"""Sampling of completions with a key-value cache, in batches that fit in memory.

Each distinct prompt is run once, left-padded with the others; its cache is then copied to the rows of
its group. A token's log-probability comes from the same forward pass that it was sampled from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from retrain.backends import Sampling
from retrain.backends.local.devices import DeviceMemory, finished_s, is_out_of_memory
from retrain.backends.local.loading import Policy, entropy
from retrain.backends.text import Text, by_completion
from retrain.backends.work import ModelCosts, WorkMeter
from retrain.engines import Drawn, Ids
from retrain.errors import BackendMemoryError

DEAD_SHARE = 0.25  # finished rows are dropped once they are this fraction of the cache

# a float32 uniform is zero once in 2^24 draws, which would give infinite Gumbel noise
SMALLEST_NOISE = 2.0**-25
GROWTH, LEAST_ROOM = 1.25, 32  # at most a quarter of the cache is unused; a token is copied about five times


@dataclass(slots=True, eq=False)
class Rows:
    """Sequences being sampled; `alive` marks those that have not ended."""

    number: torch.Tensor  # (rows,) index of each row's completion
    alive: torch.Tensor  # (rows,) bool
    position: torch.Tensor  # (rows,) of the next token
    mask: torch.Tensor | None  # (rows, length so far); None if nothing is padded
    cache: DynamicCache

    def keep(self, kept: torch.Tensor) -> None:
        """Drop all but the rows numbered in `kept`."""
        self.cache.reorder_cache(kept)
        self.number, self.position, self.alive = (t[kept] for t in (self.number, self.position, self.alive))
        self.mask = None if self.mask is None else self.mask[kept]


@dataclass(slots=True, eq=False)
class TorchSampler:
    """Samples with PyTorch, and remembers the batch size in tokens that fits."""

    policy: Policy
    text: Text
    memory: DeviceMemory
    costs: ModelCosts
    # batch size in tokens, halved when it does not fit; batching affects the random draws, so evaluation
    # has a budget of its own
    budgets: dict[str, int]
    work: WorkMeter = field(default_factory=WorkMeter)

    def complete(self, prompts: Sequence[Ids], sampling: Sampling, generator: torch.Generator) -> list[Drawn]:
        """Return each prompt's group, prompt after prompt."""
        rows = [ids for ids in prompts for _ in range(sampling.group_size)]
        budget = "sample" if sampling.seed is None else "evaluate"
        length = min(max(map(len, rows)) + sampling.max_tokens, self.policy.context)
        drawn: list[Drawn] = []
        while len(drawn) < len(rows):
            count = max(1, self.budgets[budget] // length)
            if sampling.group_size < count < len(rows):
                count -= count % sampling.group_size  # whole groups, for one prefill per prompt
            state = generator.get_state()
            part = rows[len(drawn) : len(drawn) + count]
            try:
                drawn += self._sample(part, sampling, generator)
                continue
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error)
            generator.set_state(state)
            self.memory.free()
            if len(part) == 1:
                raise BackendMemoryError(f"one completion did not fit in memory ({reason}); lower max_tokens")
            self.budgets[budget] = len(part) // 2 * length
        return drawn

    def _sample(self, prompts: Sequence[Ids], sampling: Sampling, generator: torch.Generator) -> list[Drawn]:
        """Sample one completion for each prompt; adjacent equal prompts share their prefill.

        Temperature 0 takes the most likely token, with its log-probability at temperature 1.
        """
        # inference tensors that a model caches could not be used in training
        with torch.no_grad():
            began_s = finished_s(generator.device)
            rows, hidden = prefill(self.policy, prompts, generator.device)
            prefilled_s = finished_s(generator.device)  # no extra wait: the first draw needs it anyway
            drawn = self._decode(rows, hidden, sampling, generator)
            ended_s = finished_s(generator.device)
        lengths = np.array([len(one.tokens) for one in drawn])
        self.work.add(
            self.costs.prefill([len(ids) for ids in set(prompts)], 1, prefilled_s - began_s),
            self.costs.decode(np.array([len(ids) for ids in prompts]), lengths, ended_s - prefilled_s),
        )
        return drawn

    def _decode(
        self, rows: Rows, hidden: torch.Tensor, sampling: Sampling, generator: torch.Generator
    ) -> list[Drawn]:
        device = generator.device
        ends = torch.tensor(self.text.end_ids, device=device)
        columns: list[tuple[torch.Tensor, ...]] = []
        ended = torch.zeros(len(rows.number), dtype=torch.bool, device=device)
        tails: list[list[int]] = [[] for _ in rows.number]
        while True:
            logp = self.policy.log_distribution(hidden, sampling.temperature)
            tokens = logp.argmax(-1) if sampling.temperature == 0 else _draw(logp, generator)
            drawn = logp.gather(1, tokens[:, None])[:, 0]
            columns.append(tuple(t[rows.alive] for t in (rows.number, tokens, drawn, entropy(logp))))
            over = torch.isin(tokens, ends)
            if self.text.stop:
                over |= _stopped(self.text, tails, rows, tokens)
            ended[rows.number[rows.alive & over]] = True
            rows.alive &= ~over & (rows.position + 1 < self.policy.context)
            living = int(rows.alive.sum())
            if living == 0 or len(columns) >= sampling.max_tokens:
                joined = (torch.cat(column).cpu().numpy() for column in zip(*columns, strict=True))
                return by_completion(joined, ended.tolist())
            if living <= (1 - DEAD_SHARE) * len(rows.alive):
                kept = rows.alive.nonzero()[:, 0]
                rows.keep(kept)
                tokens = tokens[kept]
            hidden = advance(self.policy, rows, tokens)


def prefill(policy: Policy, prompts: Sequence[Ids], device: torch.device) -> tuple[Rows, torch.Tensor]:
    """Run each distinct prompt once; return one row per completion, and the last hidden states."""
    distinct = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    longest = max(map(len, distinct))
    padded = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in distinct], device=device)
    lengths = torch.tensor([len(ids) for ids in distinct], device=device)
    is_padded = min(map(len, distinct)) < longest
    mask = (torch.arange(longest, device=device) >= (longest - lengths)[:, None]).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = _growing_cache(policy.causal.config)
    hidden = policy.body(
        input_ids=padded,
        attention_mask=mask if is_padded else None,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state[:, -1]
    owner = torch.tensor([distinct[prompt] for prompt in prompts], device=device)
    rows = Rows(
        number=torch.arange(len(prompts), device=device),
        alive=torch.ones(len(prompts), dtype=torch.bool, device=device),
        position=lengths[owner],
        mask=mask[owner] if is_padded else None,
        cache=cache,
    )
    cache.reorder_cache(owner)
    return rows, hidden[owner]


def advance(policy: Policy, rows: Rows, tokens: torch.Tensor) -> torch.Tensor:
    """Run the sampled tokens; return the hidden states (rows, width) for the next ones."""
    if rows.mask is not None:
        rows.mask = torch.nn.functional.pad(rows.mask, (0, 1), value=1)
    output = policy.body(
        input_ids=tokens[:, None],
        attention_mask=rows.mask,
        position_ids=rows.position[:, None],
        past_key_values=rows.cache,
        use_cache=True,
    )
    rows.position = rows.position + 1
    hidden: torch.Tensor = output.last_hidden_state[:, -1]
    return hidden


def _draw(logp: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Sample one token per distribution by the Gumbel-max trick."""
    noise = torch.empty_like(logp).exponential_(generator=generator).clamp_(min=SMALLEST_NOISE)
    return (logp - noise.log_()).argmax(-1)


def _stopped(text: Text, tails: list[list[int]], rows: Rows, tokens: torch.Tensor) -> torch.Tensor:
    over = torch.zeros_like(rows.alive)
    numbers = rows.number.tolist()
    living = rows.alive.nonzero()[:, 0].tolist()
    drawn = tokens.tolist()
    for row in living:
        tails[numbers[row]].append(drawn[row])
    found = text.is_stopped([tails[numbers[row]] for row in living])
    over[living] = torch.tensor(found, device=over.device)
    return over


def _growing_cache(config: Any) -> DynamicCache:
    """Return an empty cache that is written in place; that of transformers is copied for every token.

    Layers of other kinds (sliding windows, recurrent states) keep the model's own cache.
    """
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # Any if type-checked without transformers
    """Keys and values of one layer, (rows, heads, length, width): views of longer buffers."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states and return all states so far."""
        del args, kwargs
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.get_seq_length()
        if length == 0:  # a prompt, which is copied to its group's rows before anything is appended
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        total = length + key_states.shape[-2]
        keys, values = self._buffers or (self.keys, self.values)
        keys, values = _with_room(keys, self.keys, total), _with_room(values, self.values, total)
        keys[:, :, length:total] = key_states
        values[:, :, length:total] = value_states
        self._buffers = keys, values
        self.keys, self.values = keys[:, :, :total], values[:, :, :total]
        return self.keys, self.values


def _with_room(buffer: torch.Tensor, kept: torch.Tensor, total: int) -> torch.Tensor:
    """Return `buffer` if `kept` is a view of it and `total` tokens fit, else a longer copy of `kept`."""
    is_current = kept.data_ptr() == buffer.data_ptr() and len(kept) == len(buffer)
    if is_current and buffer.shape[2] >= total:
        return buffer
    rows, heads, length, width = kept.shape
    longer = kept.new_empty(rows, heads, max(int(total * GROWTH), total + LEAST_ROOM), width)
    longer[:, :, :length] = kept
    return longer
