"""Base weights in four bits, as bitsandbytes stores them: NF4 in blocks of 64, their scales in eight bits.

The weights of linear layers are quantized as they are loaded, and expanded layer by layer as they are used;
embeddings, output head and norms keep their type. Gradients flow through them to the adapters. Source: QLoRA,
arXiv:2305.14314.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch

from retrain import extras
from retrain.backends.local import EXTRA_4BIT


def load_quantized(dtype: torch.dtype, device: torch.device, **source: Any) -> Any:
    """Load a model with transformers, quantized on its way to a device; other weights are of `dtype`.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    extras.load("bitsandbytes", EXTRA_4BIT, 'quantization = "4bit"')
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    causal: Any = AutoModelForCausalLM.from_pretrained(
        **source, dtype=dtype, quantization_config=how, device_map={"": device}
    )
    for layer in causal.modules():
        # with AVX512-BF16 it would, after the first sample, repack the weights for a kernel without gradients
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    return causal


def weights_in(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Return the number of weights; a quantized parameter holds two in a byte."""
    states = ((p, getattr(p, "quant_state", None)) for p in parameters)
    return sum(prod(state.shape) if state is not None else p.numel() for p, state in states)
