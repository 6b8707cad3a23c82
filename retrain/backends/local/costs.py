"""What a token costs: the sizes of a loaded model that count."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch

from retrain.backends.local import LocalOptions
from retrain.backends.local.loading import Policy
from retrain.backends.work import ModelCosts

MASTER_BYTES = 4  # the optimizer keeps float32 regardless of the weights' dtype


def costs_of(policy: Policy, options: LocalOptions) -> ModelCosts:
    """Return the sizes that determine the cost of a token.

    The input embedding is a lookup and is not counted. Layers with a sliding window or a recurrent state
    count as if they cached every token.
    """
    causal = policy.causal
    config = causal.config.get_text_config()
    head = int(causal.get_output_embeddings().weight.numel())
    embedding = int(causal.get_input_embeddings().weight.numel())
    is_tied = causal.get_input_embeddings().weight is causal.get_output_embeddings().weight
    count = weights_in(causal.parameters())
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    idle = _idle(causal, config)
    return ModelCosts(
        body=count - head - (0 if is_tied else embedding) - idle,
        head=head,
        weight_bytes=sum(p.nbytes for p in causal.parameters()) / count,
        kv_bytes_per_token=2.0 * config.num_hidden_layers * heads * width * causal.dtype.itemsize,
        frozen=options.lora,
        trained_bytes=MASTER_BYTES * sum(p.numel() for p in policy.trainable().values()),
        idle=idle,
    )


def _idle(causal: Any, config: Any) -> int:
    """Return the number of weights in experts that a token is not routed to."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((int(n) for name in names if (n := getattr(config, name, None))), 0)
    used = getattr(config, "num_experts_per_tok", None)
    if not (experts and used):
        return 0
    routed = weights_in(p for name, p in causal.named_parameters() if ".experts." in name)
    return routed * (experts - int(used)) // experts


def weights_in(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Return the number of weights; a quantized parameter holds two in a byte."""
    states = ((p, getattr(p, "quant_state", None)) for p in parameters)
    return sum(prod(state.shape) if state is not None else p.numel() for p, state in states)
