"""Sizes of a model: the memory that a run takes, estimated from files, and what a token costs.

torch is not imported. The estimate counts a decoder of the Llama kind: rotary attention, gated feed-forward
layers, RMS norms. Other kinds take about as much at the same sizes. Checked against measurements in
docs/backends.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.backends import MemoryEstimate
from retrain.backends.local import LocalOptions
from retrain.backends.local.model_checks import files_of, prompt_tokens, read_json
from retrain.backends.work import ModelCosts
from retrain.base.rollouts import Prompt
from retrain.config.schema import Config
from retrain.control.machine.nvidia import gpu_nodes

if TYPE_CHECKING:
    import torch

    from retrain.backends.local.loading import Policy

RUNTIME_BYTES = {"cpu": 476 << 20, "cuda": 600 << 20}  # PyTorch, transformers, a tokenizer; a GPU's context
QUANTIZER_BYTES = 115 << 20  # bitsandbytes
FLOAT = 4  # bytes; the optimizer keeps float32 regardless of the weights' dtype
MOMENTS, GRADIENTS = 2, 1  # copies of the trained weights
SPARE = 1.25  # of a cache that grows in place
LOGITS_SAMPLED = 5  # copies in sampling: logits, log-probabilities, noise, and two that are temporary
LOGITS_TRAINED, LOGITS_AT_A_TIME = 8, 2**24  # the same in training, in chunks of so many numbers
MATRIX = 2  # dimensions
TEMPLATE_TOKENS = 32  # that a chat template adds, about
QUANTIZED = {"none": 0.0, "4bit": 0.5 + (1 + 4 / 256) / 64}  # bytes of a linear layer's weight, with scales
FRAGMENTED = {"cpu": 1.3, "cuda": 1.1}  # blocks of changing sizes leave gaps
GPU_TOKENS = 16384  # of a micro-batch
CPU_TOKENS = (256, 2048)  # at least, at most: smaller ones are slower, and larger ones no faster
CPU_ACTIVATIONS = 128 << 20  # bytes that a micro-batch's activations take on the CPU, about


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


def micro_batch(options: LocalOptions, sizes: Sizes | None, device: str, rank: int, width: int) -> int:
    """Return the tokens of a micro-batch; `width` is the bytes of a number, `sizes` None if unknown."""
    if options.tokens_per_micro_batch:
        return options.tokens_per_micro_batch
    if device != "cpu":
        return GPU_TOKENS
    least, most = CPU_TOKENS
    if sizes is None:
        return least
    return min(max(CPU_ACTIVATIONS // (sizes.activations(rank) * sizes.layers * width), least), most)


@dataclass(frozen=True, slots=True)
class LargestStep:
    """The largest step that a run may take, which decides about its memory."""

    sizes: Sizes
    options: LocalOptions
    device: str  # cpu or cuda
    width: int  # bytes of a weight
    rank: int  # of adapters; 0 without
    drawn: int  # tokens of a completion, at most
    length: int  # the same with the longest prompt and what an environment says

    def held(self) -> dict[str, int]:
        """Return the bytes that are taken all the time, by what takes them."""
        sizes, adapts = self.sizes, self.options.lora
        trained = sizes.adapters(self.rank, self.options.target_modules) if adapts else sizes.parameters
        masters = 1 if self.width < FLOAT and not adapts else 0
        quantizes = bool(QUANTIZED[self.options.quantization])
        return {
            "runtime": RUNTIME_BYTES[self.device] + (QUANTIZER_BYTES if quantizes else 0),
            "weights": self._weights(),
            "adapters": trained * FLOAT if adapts else 0,
            "optimizer": trained * FLOAT * (MOMENTS + GRADIENTS + masters),
        }

    def _weights(self) -> int:
        """Return the bytes of the weights; of quantized ones, a layer at a time is expanded."""
        linear = [n * m for _, n, m in self.sizes.linear]
        if not (width := QUANTIZED[self.options.quantization]):
            return self.sizes.parameters * self.width
        others = self.sizes.parameters - sum(linear)
        return int(sum(linear) * width + (others + max(linear, default=0)) * self.width)

    def sampling(self, rows: int) -> int:
        """Return the bytes of the key-value cache and of logits; 0 if a server samples."""
        if self.options.engine != "torch":
            return 0
        rows = max(1, min(rows, self.options.tokens_per_sampling_batch // self.length))
        cache = 2 * self.sizes.layers * self.sizes.kv_heads * self.width * self.length * SPARE
        return int(rows * (cache + LOGITS_SAMPLED * FLOAT * self.sizes.vocabulary))

    def training(self, rows: int) -> int:
        """Return the bytes of activations and of logits."""
        at_a_time = micro_batch(self.options, self.sizes, self.device, self.rank, self.width)
        rows = max(1, min(rows, at_a_time // self.length))
        of_layer, layers = self.sizes.activations(self.rank), self.sizes.layers
        kept = of_layer + self.sizes.hidden * layers
        if not self.options.gradient_checkpointing:
            kept = of_layer * layers
        logits = LOGITS_TRAINED * FLOAT * min(LOGITS_AT_A_TIME, rows * self.drawn * self.sizes.vocabulary)
        return int(rows * self.length * kept * self.width * FRAGMENTED[self.device]) + logits


def estimate(config: Config, options: LocalOptions, prompts: Sequence[Prompt]) -> MemoryEstimate | None:
    """Return what a run takes at its peak; None if the model's files are not on this machine."""
    directory = files_of(config.model.model)
    sizes = read_sizes(directory) if directory else None
    if directory is None or sizes is None or not sizes.parameters:
        return None
    training = config.training
    on_gpu = bool(gpu_nodes()) if options.device == "auto" else options.device != "cpu"
    automatic = "bfloat16" if on_gpu else "float32"
    # as many as the policy's, which nobody knows better before the first episode
    observed = 0 if config.environment.is_single_turn else training.max_tokens
    prompt = prompt_tokens(directory, prompts, options.system_prompt)
    step = LargestStep(
        sizes=sizes,
        options=options,
        device="cuda" if on_gpu else "cpu",
        width={"float32": FLOAT, "bfloat16": FLOAT // 2}[options.dtype.replace("auto", automatic)],
        rank=config.model.lora_rank if options.lora else 0,
        drawn=training.max_tokens,
        length=prompt + (TEMPLATE_TOKENS if options.chat_template else 0) + training.max_tokens + observed,
    )
    rows = training.batch_size * training.group_size
    least = max(step.sampling(1), step.training(1))
    return MemoryEstimate(step.device, step.held(), step.sampling(rows), step.training(rows), least)


def read_sizes(directory: Path) -> Sizes | None:
    """Return the sizes of a model that is saved as safetensors; None if they cannot be read."""
    config = read_json(directory / "config.json")
    text = config.get("text_config") or config
    shapes = _shapes(directory)
    try:
        hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
        head = int(text.get("head_dim") or hidden // heads)
        wide = [(name, shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == MATRIX]
        return Sizes(
            parameters=sum(map(prod, shapes.values())),
            linear=tuple(one for one in wide if not {"embed", "head", "wte", "wpe"} & _words(one[0])),
            layers=int(text["num_hidden_layers"]),
            hidden=hidden,
            heads=head * heads,
            kv_heads=head * int(text.get("num_key_value_heads") or heads),
            feed_forward=int(text.get("intermediate_size") or 4 * hidden),
            vocabulary=int(text["vocab_size"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _shapes(directory: Path) -> dict[str, Sequence[int]]:
    """Return the shape of each tensor of the directory's safetensors files."""
    shapes: dict[str, Sequence[int]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with suppress(OSError, ValueError), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, 100 << 20)))
            if isinstance(header, dict):
                shapes |= {name: facts["shape"] for name, facts in header.items() if "shape" in facts}
    return shapes


def _words(name: str) -> set[str]:
    return set(name.replace("_", ".").split("."))


def costs_of(policy: Policy, options: LocalOptions) -> ModelCosts:
    """Return the sizes that determine the cost of a token.

    The input embedding is a lookup and is not counted. Layers with a sliding window count as if they cached
    every token.
    """
    causal = policy.causal
    head = int(causal.get_output_embeddings().weight.numel())
    embedding = int(causal.get_input_embeddings().weight.numel())
    is_tied = causal.get_input_embeddings().weight is causal.get_output_embeddings().weight
    count = weights_in(causal.parameters())
    idle = _idle(causal, causal.config.get_text_config())
    return ModelCosts(
        body=count - head - (0 if is_tied else embedding) - idle,
        head=head,
        weight_bytes=sum(p.nbytes for p in causal.parameters()) / count,
        kv_bytes_per_token=_cached_bytes(policy),
        frozen=options.lora,
        trained_bytes=FLOAT * sum(p.numel() for p in policy.trainable().values()),
        idle=idle,
    )


def _cached_bytes(policy: Policy) -> float:
    """Return the bytes that a token adds to the cache; one is run, because layers may differ in size."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=policy.causal.config)
    with torch.no_grad():
        token = torch.zeros((1, 1), dtype=torch.long, device=policy.device)
        policy.run_cached(cache, token)
    states_of_layers = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return float(sum(states.nbytes for states in states_of_layers if states is not None))


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
