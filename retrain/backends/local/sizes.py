"""Estimate of the memory that a run takes, from the model's files; torch is not imported.

Counts a decoder of the Llama kind: rotary attention, gated feed-forward layers, RMS norms. Other kinds take
about as much at the same sizes. Checked against measurements in docs/backends.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from retrain.backends import MemoryEstimate
from retrain.backends.local import LocalOptions
from retrain.backends.local.names import files_of, prompt_tokens, read_json
from retrain.config.schema import Config
from retrain.rollouts import Prompt
from retrain.system.nvidia import gpu_nodes

RUNTIME_BYTES = {"cpu": 476 << 20, "cuda": 600 << 20}  # PyTorch, transformers, a tokenizer; a GPU's context
FLOAT = 4  # bytes
MOMENTS, GRADIENTS = 2, 1  # copies of the trained weights
SPARE = 1.25  # of a cache that grows in place
LOGITS_SAMPLED = 5  # copies in sampling: logits, log-probabilities, noise, and two that are temporary
LOGITS_TRAINED, LOGITS_AT_A_TIME = 8, 2**24  # the same in training, in chunks of so many numbers
MATRIX = 2  # dimensions
TEMPLATE_TOKENS = 32  # that a chat template adds, about
FRAGMENTED = {"cpu": 1.3, "cuda": 1.1}  # blocks of changing sizes leave gaps


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a saved model."""

    parameters: int
    linear: tuple[tuple[str, int, int], ...]  # name, outputs and inputs of each linear layer
    layers: int
    hidden: int
    heads: int  # width of all attention heads
    kv_heads: int  # width of all heads of keys, which is that of values
    feed_forward: int
    vocabulary: int

    def adapters(self, rank: int, targets: Sequence[str]) -> int:
        """Return the number of weights in adapters."""
        everywhere = tuple(targets) == ("all-linear",)
        chosen = (n + m for name, n, m in self.linear if everywhere or name.split(".")[-2] in targets)
        return rank * sum(chosen)

    def activations(self, rank: int) -> int:
        """Return the numbers that training keeps for each token and layer.

        Both norms' inputs and outputs; queries, keys, values and the heads' output; the gate, its activation,
        the up projection and their product; the low-rank input of seven adapters.
        """
        return 4 * self.hidden + 2 * self.heads + 2 * self.kv_heads + 4 * self.feed_forward + 7 * rank


def estimate(config: Config, options: LocalOptions, prompts: Sequence[Prompt]) -> MemoryEstimate | None:
    """Return what a run takes at its peak; None if the model's files are not on this machine."""
    directory = files_of(config.model.model)
    sizes = read_sizes(directory) if directory else None
    if directory is None or sizes is None:
        return None
    training, rank = config.training, config.model.lora_rank if options.lora else 0
    device = "cuda" if options.device.startswith("cuda") or _chooses_gpu(options) else "cpu"
    automatic = "bfloat16" if device == "cuda" else "float32"
    width = 2 if (automatic if options.dtype == "auto" else options.dtype) == "bfloat16" else FLOAT
    trained = sizes.adapters(rank, options.target_modules) if options.lora else sizes.parameters
    prompt = prompt_tokens(directory, prompts, options.system_prompt)
    length = prompt + TEMPLATE_TOKENS * options.chat_template + training.max_tokens
    rows = training.batch_size * training.group_size

    def sampling(rows: int) -> int:
        if options.engine != "torch":
            return 0
        rows = max(1, min(rows, options.tokens_per_sampling_batch // length))
        cache = 2 * sizes.layers * sizes.kv_heads * width * length * SPARE
        return int(rows * (cache + LOGITS_SAMPLED * FLOAT * sizes.vocabulary))

    def training_of(rows: int) -> int:
        tokens = length * max(1, min(rows, options.tokens_per_micro_batch // length))
        kept = sizes.activations(rank) * (1 if options.gradient_checkpointing else sizes.layers)
        kept += sizes.hidden * sizes.layers * options.gradient_checkpointing
        drawn = rows * training.max_tokens * sizes.vocabulary
        logits = LOGITS_TRAINED * FLOAT * min(LOGITS_AT_A_TIME, drawn)
        return int(tokens * kept * width * FRAGMENTED[device]) + logits

    copies = MOMENTS + GRADIENTS + (not options.lora and width < FLOAT)
    return MemoryEstimate(
        device=device,
        held={
            "runtime": RUNTIME_BYTES[device],
            "weights": sizes.parameters * width,
            "adapters": trained * FLOAT if options.lora else 0,
            "optimizer": trained * FLOAT * copies,
        },
        sampling=sampling(rows),
        training=training_of(rows),
        least=max(sampling(1), training_of(1)),
    )


def read_sizes(directory: Path) -> Sizes | None:
    """Return the sizes of a model that is saved as safetensors; None if they cannot be read."""
    config = read_json(directory / "config.json")
    text = config.get("text_config") or config
    shapes: dict[str, list[int]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        shapes |= {name: facts["shape"] for name, facts in _header(file).items() if "shape" in facts}
    try:
        hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
        head = int(text.get("head_dim") or hidden // heads)
        wide = [(name, shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == MATRIX]
        return (
            Sizes(
                parameters=sum(map(prod, shapes.values())),
                linear=tuple(one for one in wide if not {"embed", "head", "wte", "wpe"} & _words(one[0])),
                layers=int(text["num_hidden_layers"]),
                hidden=hidden,
                heads=head * heads,
                kv_heads=head * int(text.get("num_key_value_heads") or heads),
                feed_forward=int(text.get("intermediate_size") or 4 * hidden),
                vocabulary=int(text["vocab_size"]),
            )
            if shapes
            else None
        )
    except (KeyError, TypeError, ValueError):
        return None


def _chooses_gpu(options: LocalOptions) -> bool:
    return options.device == "auto" and bool(gpu_nodes())


def _words(name: str) -> set[str]:
    return set(name.replace("_", ".").split("."))


def _header(file: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: eight bytes with its length, then JSON."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            found = json.loads(opened.read(min(length, 100 << 20)))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
