"""Cache for models whose cache cannot be split by rows: all rows begin together, and none is added.

Each distinct prompt is run once, left-padded with the others; its cache is copied to the rows of its group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache

from retrain.backends.local.loading import Policy
from retrain.backends.rows import Row
from retrain.engines import Ids

DEAD_SHARE = 0.25  # finished rows are dropped once they are this fraction of the cache


class Pass:
    """Rows that began together, finished ones included; implements the sampler's cache."""

    def __init__(self, policy: Policy, device: torch.device) -> None:
        self._policy, self._device = policy, device
        self.rows: list[Row] = []

    @property
    def cells(self) -> int:
        """Zero: rows are admitted by their full length, so they never outgrow the cache."""
        return 0

    def admit(self, rows: Sequence[Row], following: Ids | None) -> list[int]:
        """Begin with these rows; return the lengths of the sequences that were run."""
        del following
        if not rows:
            return []
        distinct = {ids: number for number, ids in enumerate(dict.fromkeys(row.ids for row in rows))}
        longest = max(map(len, distinct))
        padded = [[0] * (longest - len(ids)) + list(ids) for ids in distinct]
        lengths = torch.tensor([len(ids) for ids in distinct], device=self._device)
        mask = (torch.arange(longest, device=self._device) >= (longest - lengths)[:, None]).long()
        self._cache = DynamicCache(config=self._policy.causal.config)
        hidden = self._policy.body(
            input_ids=torch.tensor(padded, device=self._device),
            attention_mask=mask if min(map(len, distinct)) < longest else None,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
        self._mask = mask if min(map(len, distinct)) < longest else None
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
        """Run one token of each row."""
        if self._mask is not None:
            self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        self.hidden = self._policy.body(
            input_ids=tokens[:, None],
            attention_mask=self._mask,
            position_ids=self._position[:, None],
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
        self._position = self._position + 1
