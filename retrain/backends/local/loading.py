"""Loads a model from a hub id or a path with transformers, and adds adapters with peft."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear
from safetensors import SafetensorError
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from retrain.backends import BackendSpec
from retrain.backends.local import EXTRA_4BIT, LocalOptions
from retrain.backends.local.devices import is_out_of_memory
from retrain.backends.local.model_checks import CONTEXT, directory_at, model_problem
from retrain.backends.local.next_token import Cut
from retrain.base import extras
from retrain.base.errors import BackendMemoryError, ConfigError, InfrastructureError, first_line
from retrain.base.extras import quiet_transformers
from retrain.records.text import first_of

LOGITS_AT_A_TIME = 2**24  # numbers: 64 MiB in float32; far fewer already keep a GPU busy
ADAPTER = "default"  # peft's name for the only adapter
Tensors = dict[str, torch.Tensor]
UNREACHABLE = ("couldn't connect", "offline mode")  # transformers' messages if the hub did not answer


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """A causal language model, split into body and output head."""

    causal: Any  # transformers' model, adapters included
    adapters: PeftModel | None  # the same model wrapped by peft; None if all parameters are trained
    body: torch.nn.Module  # token ids -> last hidden states
    context: int  # maximum tokens of prompt plus completion
    start: Tensors = field(default_factory=dict)  # of `trainable`, if they are the reference

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        device: torch.device = next(self.causal.parameters()).device
        return device

    @property
    def rows_at_a_time(self) -> int:
        """How many rows' logits are computed together."""
        return max(1, LOGITS_AT_A_TIME // int(self.causal.config.get_text_config().vocab_size))

    def run_cached(self, cache: Any, input_ids: torch.Tensor, **others: Any) -> Any:
        """Run tokens behind those in transformers' cache, which grows by them; return the body's output."""
        return self.body(
            input_ids=input_ids, use_cache=True, **{_cache_key(type(self.body).forward): cache}, **others
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return next-token logits in float32: (..., hidden) -> (..., vocabulary)."""
        config = self.causal.config.get_text_config()
        logits: torch.Tensor = self.causal.get_output_embeddings()(hidden).float()
        if scale := getattr(config, "logit_scale", None):
            logits = logits * scale
        if divisor := getattr(config, "logits_scaling", None):
            logits = logits / divisor
        if cap := getattr(config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        return logits

    def log_distribution(
        self, hidden: torch.Tensor, temperature: float, cut: Cut | None = None
    ) -> torch.Tensor:
        """Return the next token's log-probabilities at a temperature, after a cut; 0 means 1, and no cut."""
        logits = self.logits(hidden)
        logp = torch.log_softmax(logits if temperature in (0.0, 1.0) else logits / temperature, dim=-1)
        return cut.of(logp) if cut is not None and temperature else logp

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return the trained parameters by name, in a fixed order."""
        return {name: p for name, p in self.causal.named_parameters() if p.requires_grad}

    def with_own_adapters(self) -> Policy:
        """Return a policy that shares the frozen weights and has adapters, and switches, of its own."""
        assert self.adapters is not None
        shared = {id(p): p for p in self.causal.parameters() if not p.requires_grad}
        adapters = copy.deepcopy(self.adapters, shared)
        _shorten_forwards(adapters)  # those copied read the original's adapters
        causal = adapters.get_base_model()
        return Policy(causal, adapters, causal.base_model, self.context)

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Act as the reference while entered: with the start's adapters, or with none; nothing is copied."""
        disabled = self.adapters.disable_adapter() if self.adapters else nullcontext()
        with at_start(self.causal, self.start) if self.start else disabled, torch.no_grad():
            yield


@functools.cache
def _cache_key(forward: Callable[..., Any]) -> str:
    """Return what a model calls its cache: `past_key_values` in transformers before 5.24."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


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


def load(spec: BackendSpec, options: LocalOptions, device: torch.device, seed: int) -> tuple[Policy, Any]:
    """Return a model with adapters from the seed, or with every parameter trainable, and its tokenizer."""
    model = spec.model
    if problem := model_problem(model, local_files_only=options.local_files_only):
        raise ConfigError(f"[model].model: {problem}")
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(directory_at(model) or model),
        "local_files_only": options.local_files_only,
        "trust_remote_code": False,  # if it is not said, transformers asks on the terminal
        **({"revision": options.revision} if options.revision else {}),
    }
    automatic = "bfloat16" if device.type == "cuda" else "float32"
    dtype = getattr(torch, automatic if options.dtype == "auto" else options.dtype)
    with (
        fitting(model),
        _explained(model, options),
        torch.random.fork_rng(devices=[]),
        quiet_transformers(),
    ):  # drawn on the CPU, so that no GPU is initialised
        torch.default_generator.manual_seed(seed)
        config = AutoConfig.from_pretrained(**source)
        # so that sampling and training see the same policy
        for name, value in config.to_dict().items():
            if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float):
                setattr(config, name, 0.0)
        causal = _weights(options, dtype, device, {**source, "config": config})
        adapters = _with_adapters(causal, spec.lora_rank, options) if options.lora else None
        if options.gradient_checkpointing:
            renamed = getattr(causal, "activation_checkpointing_enable", None)  # its name in transformers 6
            (renamed or causal.gradient_checkpointing_enable)({"use_reentrant": False})
        tokenizer = AutoTokenizer.from_pretrained(**source)
    if not set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids):
        raise ConfigError(
            f"[model].model: {model!r} has no tokenizer (such as tokenizer.json); save one with it"
        )
    with fitting(model):
        causal.to(device)
        causal.eval()
    return Policy(causal, adapters, causal.base_model, _context(config)), tokenizer


def _context(config: Any) -> int:
    """Return the longest text that a model takes, in tokens."""
    text = config.get_text_config()
    return next((int(n) for name in CONTEXT if (n := getattr(text, name, None))), 2**31 - 1)


def _weights(options: LocalOptions, dtype: torch.dtype, device: torch.device, source: dict[str, Any]) -> Any:
    """Load a model; transformers would draw at random what its files lack, so such a model is refused."""
    how = _quantizing(dtype, device) if options.quantization == "4bit" else {}
    causal, found = AutoModelForCausalLM.from_pretrained(
        **source, **how, dtype=dtype, output_loading_info=True
    )
    if missing := sorted(found["missing_keys"]):
        name = source["pretrained_model_name_or_path"]
        lacks = f"the files of {name!r} lack weights of the model: {first_of(missing, 3)}"
        raise ConfigError(f"[model].model: {lacks}; save or download it again, as a causal language model")
    for layer in causal.modules():
        # with AVX512-BF16 it would, after the first sample, repack the weights for a kernel without gradients
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    return causal


def _quantizing(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return how linear layers are quantized on their way to a device; other weights are of `dtype`.

    bitsandbytes keeps them as NF4 in blocks of 64, their scales in eight bits, and expands a layer at a time
    when it is used. Gradients flow through them to the adapters. Source: QLoRA, arXiv:2305.14314.
    """
    extras.load("bitsandbytes", EXTRA_4BIT, 'quantization = "4bit"')
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": how, "device_map": {"": device}}


@contextmanager
def fitting(model: str) -> Iterator[None]:
    """Convert an out-of-memory error into one that names the model."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise BackendMemoryError(f"[model].model: {model!r} does not fit in memory ({error})") from error


@contextmanager
def _explained(model: str, options: LocalOptions) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        first, fix = first_line(error), "check the name, the revision and your access"
        if "custom code" in first:
            first, fix = (
                "it needs code of its own, which is never run",
                "use one that transformers has code for",
            )
        if "ignore_mismatched_sizes" in first:  # following transformers' advice would train random weights
            first = "its weights do not fit its config.json"
        message = f"[model].model: {model!r} cannot be loaded ({first})"
        if not options.local_files_only and any(words in str(error) for words in UNREACHABLE):
            raise InfrastructureError(f"{message}; use a local path, or check the connection") from error
        raise ConfigError(f"{message}; {fix}") from error


def _with_adapters(causal: Any, rank: int, options: LocalOptions) -> PeftModel:
    targets = options.target_modules
    lora = LoraConfig(
        revision=options.revision or None,  # of the base model, recorded in the adapters' config
        r=rank,
        lora_alpha=options.lora_alpha or 2 * rank,
        target_modules=targets[0] if targets == ("all-linear",) else list(targets),
        exclude_modules=_beside_text(causal),
        lora_dropout=options.lora_dropout,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        adapted = get_peft_model(causal, lora)
    except ValueError as error:
        raise ConfigError(
            f"[backend.options].target_modules: {list(targets)} ({first_line(error)})"
        ) from error
    assert isinstance(adapted, PeftModel)
    _shorten_forwards(adapted)
    return adapted


def _beside_text(causal: Any) -> str | None:
    """Return a pattern of the modules that text never passes, such as what sees; None for text models."""
    if causal.config.get_text_config() is causal.config:
        return None
    decoder, head = causal.get_decoder(), causal.get_output_embeddings()
    names = {module: re.escape(name) for name, module in causal.named_modules() if name}
    passed = "|".join(names[module] for module in (decoder, head) if module in names)
    return rf"(?!(?:{passed})(?:\.|$)).*" if decoder in names else None


def _shorten_forwards(model: torch.nn.Module) -> None:
    """Replace the forward pass of every plain LoRA layer by three calls, where peft makes about thirty.

    In small models this overhead dominates a step; in large ones the fused sum saves two passes over every
    layer's output. peft runs all other layers. Source: LoRA, arXiv:2106.09685.
    """
    for layer in model.modules():
        if type(layer) is not Linear or type(layer.get_base_layer()) is not torch.nn.Linear:
            continue
        if ADAPTER not in layer.lora_variant and not layer.lora_bias[ADAPTER]:
            layer.__dict__["forward"] = _direct(layer)


def _direct(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    base = layer.get_base_layer()
    down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    scaling, dropout = layer.scaling[ADAPTER], layer.lora_dropout[ADAPTER]
    drops = isinstance(dropout, torch.nn.Dropout)

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        result = linear(rows, base.weight, base.bias)
        shape = (*x.shape[:-1], result.shape[-1])
        if layer.disable_adapters:
            return result.view(shape)
        low = dropout(rows) if drops else rows
        if x.dtype is down.dtype:  # in place: nothing else needs the layer's output without its adapters
            return result.addmm_(linear(low, down), up.t(), alpha=scaling).view(shape)
        low = linear(low.to(down.dtype), down)
        return torch.addmm(result.to(down.dtype), low, up.t(), alpha=scaling).to(result.dtype).view(shape)

    return forward
