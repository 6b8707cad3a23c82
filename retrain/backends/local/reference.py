"""The adapters that a run started from, kept as the reference of its KL term."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


def copied(tensors: dict[str, torch.nn.Parameter]) -> Tensors:
    """Return a copy of trained parameters."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@contextmanager
def at_start(causal: Any, start: Tensors) -> Iterator[None]:
    """Exchange a model's adapters with those of its start, without dropout; nothing is copied."""
    drops = [layer for layer in causal.modules() if isinstance(layer, torch.nn.Dropout) and layer.training]
    _exchange(causal, start, drops, drop=False)
    try:
        yield
    finally:
        _exchange(causal, start, drops, drop=True)


def _exchange(causal: Any, start: Tensors, drops: list[torch.nn.Dropout], *, drop: bool) -> None:
    for layer in drops:
        layer.train(drop)
    for name, own in causal.named_parameters():
        if name in start:
            own.data, start[name] = start[name], own.data
