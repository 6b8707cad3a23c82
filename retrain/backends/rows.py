"""Completions in progress, where they come from, and the random numbers that each is drawn with."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from retrain.engines import Drawn, Ids

# Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014: SplitMix64
GAMMA, FIRST, SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
FRACTION_BITS = 53


@dataclass(slots=True, eq=False)
class Row:
    """One completion: its prompt, and the tokens so far."""

    prompt: Ids
    limit: int  # maximum tokens
    stream: int = 0  # names its random numbers, so that they do not depend on the rows beside it
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    has_ended: bool = False  # with an end token or a stop string

    @property
    def ids(self) -> Ids:
        return (*self.prompt, *self.tokens)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def is_done(self) -> bool:
        return self.has_ended or len(self.tokens) >= self.limit

    def append(self, token: int, logprob: float, entropy: float, ends: Collection[int]) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.entropies.append(entropy)
        self.has_ended = token in ends

    def drawn(self) -> Drawn:
        entropy = sum(self.entropies) / len(self.entropies) if self.entropies else float("nan")
        return Drawn(tuple(self.tokens), np.array(self.logprobs), entropy, self.has_ended)


def uniforms(rows: Sequence[Row], count: int) -> NDArray[np.float64]:
    """Return the numbers in [0, 1) for the next `count` tokens of each row: (count, rows)."""
    streams = np.array([row.stream for row in rows], dtype=np.uint64)
    drawn = np.array([len(row.tokens) for row in rows], dtype=np.uint64)
    steps = drawn + np.arange(1, count + 1, dtype=np.uint64)[:, None]
    mixed = streams + steps * GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * SECOND
    mixed ^= mixed >> np.uint64(31)
    fractions: NDArray[np.float64] = (mixed >> np.uint64(64 - FRACTION_BITS)) * 2.0**-FRACTION_BITS
    return fractions


class RowSource(Protocol):
    """Where rows come from, also while others run."""

    def take(self, under_way: int) -> Sequence[Row]:
        """Return rows to begin; with none under way, none are the end."""

    def end(self, rows: Sequence[Row]) -> None:
        """Take rows that are done."""


class GivenRows:
    """Rows that are known beforehand, without those that are done."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = [row for row in rows if not row.is_done]

    def take(self, under_way: int) -> Sequence[Row]:
        rows, self._rows = self._rows, []
        return rows

    def end(self, rows: Sequence[Row]) -> None:
        """Do nothing: whoever gave them has them."""


class Admission:
    """Whether rows that wait join those that run: each time costs a pass, in which these stand still.

    They wait until they have lost as many tokens as that costs, which is at most twice what the best choice
    of times would lose (ski rental: Karlin et al., "Competitive snoopy caching", Algorithmica 1988).
    """

    def __init__(self) -> None:
        self._lost = 0

    def is_due(self, waiting: int, running: int, tokens: int = 1) -> bool:
        """Return whether so many rows are to join, before the next `tokens` of each that runs."""
        if self._lost < running:
            self._lost += waiting * tokens
            return False
        self._lost = 0
        return True
