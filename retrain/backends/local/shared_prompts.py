"""Training that runs each prompt once: the completions of a group attend to the states of their prompt.

Prompts and completions are laid out in one row, so that everything but attention meets each token once. The
gradient reaches a prompt through all of its completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from retrain.backends.local.cohorts import attending
from retrain.backends.local.loading import Policy

ATTENTION = "retrain-shared-prompts"  # name of this module's attention in transformers


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
            len(prompts),
            len(prompts) * longest,
            torch.tensor(owners, device=device),
            positions[None],
            mask,
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
    (asked, asking), (keys, own_keys), (values, own_values) = (
        _apart(states, layout) for states in (query, key, value)
    )
    grouped = query.shape[1] != key.shape[1]
    of_prompts = scaled_dot_product_attention(
        asked, keys, values, is_causal=True, scale=scaling, enable_gqa=grouped
    )
    keys = torch.cat([keys.index_select(0, layout.owners), own_keys], dim=2)
    values = torch.cat([values.index_select(0, layout.owners), own_values], dim=2)
    if grouped and query.device.type != "cpu":  # there, a mask and shared heads have no fast kernel
        count = query.shape[1] // key.shape[1]
        keys, values = keys.repeat_interleave(count, 1), values.repeat_interleave(count, 1)
        grouped = False
    of_completions = scaled_dot_product_attention(
        asking, keys, values, attn_mask=layout.mask, scale=scaling, enable_gqa=grouped
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
