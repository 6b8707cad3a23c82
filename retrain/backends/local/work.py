"""What the planner and the roofline hints may know of a loaded policy: its size, and what a token costs."""

from __future__ import annotations

from typing import Any

import torch

from retrain.backends import BackendInfo
from retrain.backends.local.loading import Policy
from retrain.backends.local.options import LocalOptions
from retrain.backends.work import ModelCosts

MASTER_BYTES = 4  # the optimizer keeps float32 whatever the weights are stored in


def info_of(policy: Policy, options: LocalOptions, device: torch.device) -> BackendInfo:
    """Return what a policy is to its planner."""
    return BackendInfo(
        parameters=sum(p.numel() for p in policy.causal.parameters()),
        remote=options.engine == "openai",
        deterministic=device.type == "cpu" and options.engine == "torch",
    )


def costs_of(policy: Policy, options: LocalOptions) -> ModelCosts:
    """Take a policy's size apart.

    The input embedding is looked up, not multiplied. Layers with a sliding window or a recurrent state
    count as if they cached every token.
    """
    causal = policy.causal
    config = causal.config.get_text_config()
    head = int(causal.get_output_embeddings().weight.numel())
    embedding = int(causal.get_input_embeddings().weight.numel())
    is_tied = causal.get_input_embeddings().weight is causal.get_output_embeddings().weight
    count = sum(p.numel() for p in causal.parameters())
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    idle = _idle(causal, config)
    return ModelCosts(
        body=count - head - (0 if is_tied else embedding) - idle,
        head=head,
        weight_bytes=causal.dtype.itemsize,
        kv_bytes_per_token=2.0 * config.num_hidden_layers * heads * width * causal.dtype.itemsize,
        frozen=options.lora,
        trained_bytes=MASTER_BYTES * sum(p.numel() for p in policy.trainable().values()),
        idle=idle,
    )


def _idle(causal: Any, config: Any) -> int:
    """Count the weights of experts that a token is not sent to."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((int(n) for name in names if (n := getattr(config, name, None))), 0)
    used = getattr(config, "num_experts_per_tok", None)
    if not (experts and used):
        return 0
    routed: int = sum(p.numel() for name, p in causal.named_parameters() if ".experts." in name)
    return routed * (experts - int(used)) // experts
