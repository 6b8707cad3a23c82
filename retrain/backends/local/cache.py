"""A key-value cache with room to grow: a token is written in place, where transformers copies everything.

Layers of other kinds (sliding windows, recurrent states) stay as the model wants them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

GROWTH, LEAST_ROOM = 1.25, 32  # a quarter of the cache is idle at worst; each token is copied five times


def growing_cache(config: Any) -> DynamicCache:
    """Make an empty cache for a model."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # checked without transformers, it is Any
    """Keys and values of one layer, (rows, heads, length, width): views of buffers that are longer."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states; give all so far."""
        del args, kwargs
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.get_seq_length()
        if length == 0:  # a prompt: it is copied to its group's rows before anything is appended
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
    """Return `buffer` if it holds what is kept and `total` tokens, else a longer copy."""
    is_current = kept.data_ptr() == buffer.data_ptr() and len(kept) == len(buffer)
    if is_current and buffer.shape[2] >= total:
        return buffer
    rows, heads, length, width = kept.shape
    longer = kept.new_empty(rows, heads, max(int(total * GROWTH), total + LEAST_ROOM), width)
    longer[:, :, :length] = kept
    return longer
