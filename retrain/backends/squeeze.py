"""Analyse the effective rank of a LoRA adapter, and truncate it to a smaller rank.

The update of a layer is scale * B A. With B = Qb Rb and A^T = Qa Ra its singular values are those of the
r x r core scale * Rb Ra^T, so the full matrix is never formed. Truncation gives the best approximation
of that rank (Eckart and Young, 1936, doi:10.1007/BF02288367).

Adapters are in peft's format, adapter_config.json and adapter_model.safetensors. Needs torch and safetensors
(extra `local`); peft is not imported.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrain.base import extras
from retrain.base.errors import ConfigError, os_errors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # peft's prefix of module names
FACTORS = (  # suffixes of the two factors' names, for linear layers and embeddings
    (".lora_A.weight", ".lora_B.weight"),
    (".lora_embedding_A", ".lora_embedding_B"),
)
BASE_CHANGING = ("pissa", "olora", "corda", "milora")  # initializations that also rewrite the base model
PROBES = 64  # random inputs for comparing outputs

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


@dataclass(frozen=True)
class LayerSpectrum:
    """Singular values of one layer's update, in descending order; all zero before the first step."""

    name: str
    singular_values: tuple[float, ...]

    def retained(self, rank: int) -> float:
        """Return the fraction of variance (squared Frobenius norm) in the first `rank` directions."""
        largest = self.singular_values[0]  # relative to it, squares neither overflow nor underflow
        squares = [(value / largest) ** 2 for value in self.singular_values]
        return math.fsum(squares[:rank]) / math.fsum(squares)


@dataclass(frozen=True)
class Retained:
    """Variance that a rank retains, as fractions over the trained layers."""

    rank: int
    mean_fraction: float
    worst_fraction: float
    worst_layer: str


@dataclass(frozen=True)
class Spectrum:
    """All layers of an adapter."""

    layers: tuple[LayerSpectrum, ...]

    @property
    def trained(self) -> Sequence[LayerSpectrum]:
        return [layer for layer in self.layers if any(layer.singular_values)]

    @property
    def rank(self) -> int:
        return max(len(layer.singular_values) for layer in self.layers)

    def at(self, rank: int) -> Retained:
        shares = {layer.name: layer.retained(rank) for layer in self.trained} or {"": 1.0}
        worst = min(shares, key=lambda name: shares[name])
        return Retained(rank, math.fsum(shares.values()) / len(shares), shares[worst], worst)

    def recommended(self, keep_fraction: float) -> Retained:
        """Return the smallest rank at which every layer retains at least this fraction."""
        ranks = (self.at(rank) for rank in range(1, self.rank + 1))
        return next((kept for kept in ranks if kept.worst_fraction >= keep_fraction), self.at(self.rank))


def analyse(adapter: Adapter) -> Spectrum:
    """Return the singular values of every layer, computed in double precision."""
    values_of = {layer.name: _decomposed(layer)[1] * abs(layer.scale) for layer in adapter.layers}
    return Spectrum(tuple(LayerSpectrum(name, tuple(values.tolist())) for name, values in values_of.items()))


def squeezed(adapter: Adapter, rank: int) -> Adapter:
    """Truncate every layer to at most `rank`; scale and dtype are unchanged."""

    def cut(layer: Layer) -> Layer:
        left, values, right = _decomposed(layer)
        root = values[:rank].sqrt()  # split evenly over both factors, so that neither loses precision
        a = (right[:, :rank] * root).T.to(layer.a.dtype)
        b = (left[:, :rank] * root).to(layer.b.dtype)
        before, after = (_scale(adapter.config, layer.alpha, each) for each in (layer.rank, rank))
        return replace(layer, a=a, b=b, alpha=layer.alpha * before / after)

    layers = tuple(cut(layer) if layer.rank > rank else layer for layer in adapter.layers)
    return replace(adapter, layers=layers)


def _decomposed(layer: Layer) -> tuple[Any, Any, Any]:
    """Return U (outputs, rank), S, V (inputs, rank) of b @ a through its r x r core."""
    linalg = extras.load("torch", "local", "squeeze").linalg
    outputs, core_b = linalg.qr(layer.b.double())
    inputs, core_a = linalg.qr(layer.a.double().T)
    left, values, right = linalg.svd(core_b @ core_a.T)
    return outputs @ left[:, : len(values)], values, inputs @ right[: len(values)].T


def output_error(adapter: Adapter, other: Adapter) -> float:
    """Return the largest relative error of a layer's outputs, ||y - y'|| / ||y||, on random inputs."""
    torch = extras.load("torch", "local", "squeeze")
    random = torch.Generator().manual_seed(0)
    worst = 0.0
    for layer, other_layer in zip(adapter.layers, other.layers, strict=True):
        probes = torch.randn(layer.a.shape[1], PROBES, generator=random, dtype=torch.float64)
        outputs, other_outputs = (
            each.scale * (each.b.double() @ (each.a.double() @ probes)) for each in (layer, other_layer)
        )
        if outputs.norm() > 0:
            worst = max(worst, float((outputs - other_outputs).norm() / outputs.norm()))
    return worst


def read_adapter(directory: Path) -> Adapter:
    """Read an adapter that peft saved; a ConfigError if there is none, or it cannot be truncated."""
    safetensors = extras.load("safetensors", "local", "squeeze")
    load_file = extras.load("safetensors.torch", "local", "squeeze").load_file
    path = directory / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{directory}: contains no {CONFIG}; name an adapter saved by peft, or a run with an adapter"
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
    return Layer(name, a, b, float(alpha), _scale(config, alpha, a.shape[0]), keys)


def _scale(config: Mapping[str, Any], alpha: float, rank: int) -> float:
    """Return the factor of b @ a: alpha / rank, with rsLoRA (arXiv:2312.03732) alpha / sqrt(rank)."""
    return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))


def write_adapter(adapter: Adapter, directory: Path) -> None:
    """Write an adapter that peft can load; the directory must not exist."""
    save_file = extras.load("safetensors.torch", "local", "squeeze").save_file
    factors = {
        key: tensor.contiguous()
        for layer in adapter.layers
        for key, tensor in zip(layer.keys, (layer.a, layer.b), strict=True)
    }
    ranks = {re.escape(layer.name): layer.rank for layer in adapter.layers}
    alphas = {
        re.escape(layer.name): int(layer.alpha) if layer.alpha.is_integer() else layer.alpha
        for layer in adapter.layers
    }
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    ranks_and_alphas = {  # the most common values, and the layers that differ
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: own for name, own in ranks.items() if own != rank},
        "alpha_pattern": {name: own for name, own in alphas.items() if own != alpha},
    }
    try:
        directory.mkdir(parents=True)
        with os_errors():
            save_file({**adapter.others, **factors}, str(directory / WEIGHTS), metadata={"format": "pt"})
        text = json.dumps({**adapter.config, **ranks_and_alphas}, indent=2, sort_keys=True)
        (directory / CONFIG).write_text(text + "\n", encoding="utf-8")
    except FileExistsError as error:
        raise ConfigError(f"{directory}: exists; name a directory that does not") from error
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written ({error.strerror})") from error
