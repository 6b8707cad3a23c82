"""Two sequential tests of whether the mean of differences is 0: over signs, or by Student's t."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float64]

FEWEST = 3  # seeds before a verdict
INTERIM = 0.09  # nominal two-sided error of an early look, as a share of the whole
ALL_INTERIM = 0.5  # most of the error that all early looks of the t test take together
ENUMERATED = 14  # seeds whose patterns of signs are all counted; further signs are drawn
EARLIER = 1e-7  # weight of the earlier sums, which orders sums that are equal
ALIKE = 1e-3  # range of differences relative to their mean, up to which they are of one size: not normal
NORMAL = NormalDist()


@dataclass(frozen=True)
class Outcome:
    """Where a sequence of differences stands among all patterns of its signs."""

    rejected_at: int  # the first look, in seeds, that rejects a mean of 0; 0: none so far
    share: float  # of patterns that are rejected before, or at the same look and at least as far from 0
    sign: int = 0  # of the mean at that look; 0: none is rejected


@dataclass(frozen=True)
class SignFlips:
    """The exact sequential test over patterns of signs."""

    max_seeds: int

    def can_reject(self, seeds: int, error: float) -> bool:
        """Whether the most extreme pattern of so many signs is rare enough, among those that are counted."""
        return 2.0 ** (1 - min(seeds, ENUMERATED)) <= error

    def outcome(self, d: FloatArray, error: float, *, final: bool = False) -> Outcome:
        """Return where differences stand that were looked at after each seed; `final`: none will follow."""
        last = len(d) if final else self.max_seeds
        signs = _patterns(self.max_seeds)[:, : len(d)]
        if self.max_seeds > ENUMERATED:  # patterns are a sample: what was seen is one of them
            signs = np.vstack([signs, np.where(d < 0, -1.0, 1.0)])
        squares = np.cumsum(d * d)
        sums, seen = _statistics(signs * np.abs(d)), _statistics(d[None, :])[0]
        alive = np.ones(len(signs), bool)
        room = math.floor(error * len(signs) * (1 + 1e-12))  # patterns that may still reject
        for k in range(FEWEST, len(d) + 1):
            if not self.can_reject(k, error):
                continue
            reached, here = sums[:, k - 1], seen[k - 1]
            bound = 0.0 if k == last else _boundary(k, squares[k - 1], INTERIM * error)
            above = _above(reached[alive & (reached >= bound)], room)
            if squares[k - 1] > 0 and here >= bound and here > above:
                return Outcome(k, float(np.mean(~alive | (reached >= here))), _sign(d[:k]))
            hit = alive & (reached >= bound) & (reached > above)
            room -= int(hit.sum())
            alive &= ~hit
        return Outcome(0, float(np.mean(~alive | (sums[:, -1] >= seen[-1]))))


@dataclass(frozen=True)
class Normal:
    """The sequential t test, for so few seeds that signs alone never suffice."""

    max_seeds: int

    def can_reject(self, seeds: int, error: float) -> bool:
        """Whether there are enough seeds for a variance."""
        return seeds >= FEWEST and error > 0.0

    def outcome(self, d: FloatArray, error: float, *, final: bool = False) -> Outcome:
        """Return where differences stand that were looked at after each seed; `final`: none will follow."""
        last = len(d) if final else self.max_seeds
        before, early = 0.0, min(INTERIM, ALL_INTERIM / max(1, self.max_seeds - FEWEST))
        for k in range(FEWEST, len(d) + 1):
            nominal = error * early if k < last else error - before
            total, squares = abs(float(d[:k].sum())), float((d[:k] ** 2).sum())
            is_spread = float(np.ptp(d[:k])) > ALIKE * total / k
            if is_spread and total >= _boundary(k, squares, nominal):
                return Outcome(k, before + 2 * NORMAL.cdf(-score(d[:k])), _sign(d[:k]))
            before += nominal
        return Outcome(0, 2 * NORMAL.cdf(-score(d)))


def _sign(d: FloatArray) -> int:
    return int(np.sign(d.sum()))


@lru_cache(maxsize=4)
def _patterns(seeds: int) -> FloatArray:
    """Return patterns of signs, (patterns, seeds); the first is +, as a pattern's reverse counts alike."""
    listed = min(seeds, ENUMERATED) - 1
    bits = np.arange(2**listed)[:, None] >> np.arange(listed) & 1
    drawn = np.random.default_rng(0).integers(0, 2, (len(bits), max(0, seeds - ENUMERATED)))
    return np.hstack([np.ones((len(bits), 1)), 2.0 * bits - 1, 2.0 * drawn - 1])


def _statistics(differences: FloatArray) -> FloatArray:
    """Return |sum| after each seed, (patterns, seeds); of equal sums, the one reached earlier is larger.

    Differences of few distinct values tie often, and ties that do not fit would leave error unspent.
    """
    sums = np.abs(np.cumsum(differences, axis=1))
    average = np.cumsum(sums, axis=1) / np.arange(1, sums.shape[1] + 1)
    return sums + EARLIER * average


def _above(sums: FloatArray, room: int) -> float:
    """Return the value that the `room` largest sums exceed; ties that do not fit are left out together."""
    if len(sums) <= room:
        return -math.inf
    return float(np.partition(sums, len(sums) - room - 1)[len(sums) - room - 1])


def _wallace(freedom: int) -> float:
    """Return the factor of Wallace's transform of Student's t to a normal score (1959)."""
    return (8 * freedom + 1) / (8 * freedom + 3)


def _boundary(seeds: int, squares: float, error: float) -> float:
    """Return the |sum| of differences at which Student's t has this two-sided error."""
    z = NORMAL.inv_cdf(1 - error / 2) / _wallace(seeds - 1)
    return math.sqrt(seeds * squares * -math.expm1(-z * z / (seeds - 1)))


def score(d: FloatArray) -> float:
    """Return the normal score of Student's t of the differences, without its sign."""
    seeds, squares, total = len(d), float((d * d).sum()), float(d.sum())
    if squares == 0:
        return 0.0
    share = min(total * total / (seeds * squares), 1 - 1e-12)  # of the squares, which the mean explains
    return _wallace(seeds - 1) * math.sqrt((seeds - 1) * -math.log1p(-share))
