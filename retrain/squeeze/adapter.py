"""Read and write LoRA adapters in peft's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain import extras
from retrain.errors import ConfigError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # peft's prefix of module names
FACTORS = (  # suffixes of the two factors' names, for linear layers and embeddings
    (".lora_A.weight", ".lora_B.weight"),
    (".lora_embedding_A", ".lora_embedding_B"),
)
BASE_CHANGING = ("pissa", "olora", "corda", "milora")  # initializations that also rewrite the base model

Tensor = Any  # torch is imported only where it is needed


@dataclass(frozen=True)
class Layer:
    """One adapted module: its update is `scale` * b @ a."""

    name: str  # of the module, without peft's prefix
    a: Tensor  # (rank, inputs)
    b: Tensor  # (outputs, rank)
    alpha: float
    scale: float
    keys: tuple[str, str]  # of a and b in the file

    @property
    def rank(self) -> int:
        return int(self.a.shape[0])


@dataclass(frozen=True)
class Adapter:
    """An adapter: its layers, and tensors that remain unchanged."""

    config: Mapping[str, Any]
    layers: tuple[Layer, ...]
    others: Mapping[str, Tensor]  # trained modules, biases

    @property
    def size_bytes(self) -> int:
        factors = [factor for layer in self.layers for factor in (layer.a, layer.b)]
        return sum(t.numel() * t.element_size() for t in [*factors, *self.others.values()])


def read_adapter(directory: Path) -> Adapter:
    """Read an adapter that peft saved.

    Raises:
        ConfigError: the directory contains no adapter, or a kind that cannot be truncated.
    """
    safetensors = extras.load("safetensors", "local", "squeeze")
    load_file = extras.load("safetensors.torch", "local", "squeeze").load_file
    config = _read_config(directory / CONFIG)
    try:
        tensors = dict(load_file(str(directory / WEIGHTS)))
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(
            f"{directory / WEIGHTS}: cannot be read ({error}); save the adapter again"
        ) from error
    named = [(key, a, b) for key in sorted(tensors) for a, b in FACTORS if key.endswith(a)]
    if not named:
        raise ConfigError(f"{directory / WEIGHTS}: contains no LoRA factors; save the adapter again")
    pairs = [(key, key.removesuffix(a) + b) for key, a, b in named]
    return Adapter(config, tuple(_layer(directory, config, tensors, keys) for keys in pairs), tensors)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path.parent}: contains no {CONFIG}; name an adapter saved by peft, or a run with an adapter"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); save the adapter again") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: not a LoRA adapter; only LoRA adapters can be squeezed")
    if config.get("use_dora"):
        raise ConfigError(
            f"{path}: DoRA normalizes each update, so it cannot be truncated; squeeze a plain LoRA adapter"
        )
    initialization = str(config.get("init_lora_weights", "")).lower()
    if initialization.startswith(BASE_CHANGING):
        raise ConfigError(
            f"{path}: init_lora_weights = {initialization!r} also changed the base model, in a way "
            "that depends on the rank; convert it to a plain LoRA adapter with peft first"
        )
    return config


def _layer(
    directory: Path, config: Mapping[str, Any], tensors: dict[str, Tensor], keys: tuple[str, str]
) -> Layer:
    if keys[1] not in tensors:
        raise ConfigError(f"{directory / WEIGHTS}: {keys[0]} has no {keys[1]}; save the adapter again")
    a, b = (tensors.pop(key) for key in keys)
    name = re.sub(r"\.lora_(embedding_)?A(\.weight)?$", "", keys[0]).removeprefix(PREFIX)
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
        raise ConfigError(
            f"{directory / WEIGHTS}: {name} has factors of shape {tuple(a.shape)} and {tuple(b.shape)}; "
            "only those of linear layers and embeddings can be squeezed"
        )
    if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
        raise ConfigError(
            f"{directory / WEIGHTS}: {name} contains NaN or infinite values, so training diverged; "
            "squeeze an earlier checkpoint"
        )
    patterns = (config.get("alpha_pattern") or {}).items()
    matching = (value for key, value in patterns if re.match(rf"(.*\.)?({key})$", name))
    alpha = next(matching, config.get("lora_alpha", 8))
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ConfigError(f"{directory / CONFIG}: lora_alpha of {name} is {alpha!r}; needs a finite number")
    return Layer(name, a, b, float(alpha), scale_of(config, alpha, a.shape[0]), keys)


def scale_of(config: Mapping[str, Any], alpha: float, rank: int) -> float:
    """Return the factor of b @ a: alpha / rank, with rsLoRA (arXiv:2312.03732) alpha / sqrt(rank)."""
    return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))


def write_adapter(adapter: Adapter, directory: Path) -> None:
    """Write an adapter that peft can load; the directory must not exist.

    Raises:
        ConfigError: the directory exists, or cannot be written.
    """
    save_file = extras.load("safetensors.torch", "local", "squeeze").save_file
    factors = {
        key: tensor.contiguous()
        for layer in adapter.layers
        for key, tensor in zip(layer.keys, (layer.a, layer.b), strict=True)
    }
    try:
        directory.mkdir(parents=True)
        save_file({**adapter.others, **factors}, str(directory / WEIGHTS), metadata={"format": "pt"})
        text = json.dumps({**adapter.config, **_ranks(adapter)}, indent=2, sort_keys=True)
        (directory / CONFIG).write_text(text + "\n", encoding="utf-8")
    except FileExistsError as error:
        raise ConfigError(f"{directory}: exists; name a directory that does not") from error
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written ({error.strerror})") from error


def _ranks(adapter: Adapter) -> dict[str, Any]:
    """Return the rank and alpha keys of the config: the most common values, and the layers that differ."""
    ranks = {re.escape(one.name): one.rank for one in adapter.layers}
    alphas = {re.escape(one.name): int(a) if (a := one.alpha).is_integer() else a for one in adapter.layers}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    return {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: own for name, own in ranks.items() if own != rank},
        "alpha_pattern": {name: own for name, own in alphas.items() if own != alpha},
    }
