"""Tokens that an API bills, by what they cost; without imports, as every command has them."""

from __future__ import annotations

import math
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retrain.config.prices import Price

MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens by what they cost."""

    prefill: int = 0
    cached: int = 0
    sample: int = 0
    train: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Tokens) -> Tokens:
        return Tokens(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def usd(self, price: Price) -> float:
        """Return what they cost, in dollars."""
        return math.fsum(count * getattr(price, kind) for kind, count in asdict(self).items()) / MILLION
