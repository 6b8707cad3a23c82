"""Analyse the effective rank of a LoRA adapter, and truncate it to a smaller rank.

The update of a layer is scale * B A. With B = Qb Rb and A^T = Qa Ra its singular values are those of the
r x r core scale * Rb Ra^T, so the full matrix is never formed. Truncation gives the best approximation
of that rank (Eckart and Young, 1936, doi:10.1007/BF02288367).

Needs torch and safetensors (extra `local`); peft is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from retrain import extras
from retrain.squeeze.adapter import Adapter, Layer, read_adapter, scale_of, write_adapter

__all__ = ["Adapter", "analyse", "output_error", "read_adapter", "squeezed", "write_adapter"]

PROBES = 64  # random inputs for comparing outputs


@dataclass(frozen=True)
class LayerSpectrum:
    """Singular values of one layer's update, in descending order."""

    name: str
    singular_values: tuple[float, ...]

    @property
    def is_trained(self) -> bool:
        """Whether the update is nonzero; it is zero before the first step."""
        return any(self.singular_values)

    def retained(self, rank: int) -> float:
        """Return the fraction of variance (squared Frobenius norm) in the first `rank` directions."""
        if not self.is_trained:
            return 1.0
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
        return [layer for layer in self.layers if layer.is_trained]

    @property
    def rank(self) -> int:
        return max(len(layer.singular_values) for layer in self.layers)

    def at(self, rank: int) -> Retained:
        shares = {layer.name: layer.retained(rank) for layer in self.trained}
        if not shares:
            return Retained(rank, 1.0, 1.0, "")
        worst = min(shares, key=lambda name: shares[name])
        return Retained(rank, math.fsum(shares.values()) / len(shares), shares[worst], worst)

    def recommended(self, keep_fraction: float) -> Retained:
        """Return the smallest rank at which every layer retains at least this fraction."""
        ranks = (self.at(rank) for rank in range(1, self.rank + 1))
        return next((one for one in ranks if one.worst_fraction >= keep_fraction), self.at(self.rank))


def analyse(adapter: Adapter) -> Spectrum:
    """Return the singular values of every layer, computed in double precision."""
    found = {layer.name: _decomposed(layer)[1] * abs(layer.scale) for layer in adapter.layers}
    return Spectrum(tuple(LayerSpectrum(name, tuple(values.tolist())) for name, values in found.items()))


def squeezed(adapter: Adapter, rank: int) -> Adapter:
    """Truncate every layer to at most `rank`; scale and dtype are unchanged."""
    return replace(adapter, layers=tuple(_cut(adapter, layer, rank) for layer in adapter.layers))


def _cut(adapter: Adapter, layer: Layer, rank: int) -> Layer:
    if layer.rank <= rank:
        return layer
    left, values, right = _decomposed(layer)
    root = values[:rank].sqrt()  # split evenly over both factors, so that neither loses precision
    a = (right[:, :rank] * root).T.to(layer.a.dtype)
    b = (left[:, :rank] * root).to(layer.b.dtype)
    before, after = (scale_of(adapter.config, layer.alpha, each) for each in (layer.rank, rank))
    return replace(layer, a=a, b=b, alpha=layer.alpha * before / after)


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
    for one, two in zip(adapter.layers, other.layers, strict=True):
        probes = torch.randn(one.a.shape[1], PROBES, generator=random, dtype=torch.float64)
        wanted, found = (each.scale * (each.b.double() @ (each.a.double() @ probes)) for each in (one, two))
        if wanted.norm() > 0:
            worst = max(worst, float((wanted - found).norm() / wanted.norm()))
    return worst
