"""The sequential test of whether the mean of differences is 0, over the patterns of their signs."""

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
EARLY_INTERIM = 0.3  # the same of a comparison that is to end early
ENUMERATED = 14  # seeds whose patterns of signs are all counted; further signs are drawn
EARLIER = 1e-7  # weight of the earlier sums, which orders sums that are equal
REPEATED = 4096  # looks that are kept: a campaign repeats its own at each round
NORMAL = NormalDist()


@dataclass(frozen=True)
class Outcome:
    """Where a sequence of differences stands among all patterns of its signs."""

    rejected_at: int  # the first look, in seeds, that rejects a mean of 0; 0: none so far
    share: float  # of patterns that are rejected before, or at the same look and at least as far from 0
    sign: int = 0  # of the mean at that look; 0: none is rejected


def fewest_seeds(error: float) -> int:
    """Return how many seeds it takes until equal signs throughout are rarer than an error."""
    return 1 + math.ceil(math.log2(1 / error) - 1e-9)


@dataclass(frozen=True)
class SignFlips:
    """The exact sequential test over patterns of signs."""

    max_seeds: int
    interim: float = INTERIM

    def can_reject(self, seeds: int, error: float) -> bool:
        """Whether the most extreme pattern of so many signs is rare enough, among those that are counted."""
        return min(seeds, ENUMERATED) >= fewest_seeds(error)

    def outcome(self, d: FloatArray, error: float, *, final: bool = False) -> Outcome:
        """Return where differences stand that were looked at after each seed; `final`: none will follow."""
        return self._outcome(d.tobytes(), error, len(d) if final else self.max_seeds)

    @lru_cache(maxsize=REPEATED)  # noqa: B019  # of frozen values, and bounded
    def _outcome(self, differences: bytes, error: float, last: int) -> Outcome:
        d = np.frombuffer(differences)
        signs = _patterns(self.max_seeds)[: len(d)]
        # the first column is what was seen: where patterns are a sample, it is one of them
        signs = np.hstack([np.where(d < 0, -1.0, 1.0)[:, None], signs])
        counted = 0 if self.max_seeds > ENUMERATED else 1
        alive, squares = np.ones(signs.shape[1] - counted, bool), 0.0
        room = math.floor(error * len(alive) * (1 + 1e-12))  # patterns that may still reject
        sums, earlier, reached = (np.zeros(signs.shape[1]) for _ in range(3))
        for k, size in enumerate(np.abs(d), 1):
            squares += size * size
            sums += signs[k - 1] * size
            earlier += np.abs(sums)
            # ties of few distinct values would leave error unspent, so what got there earlier is larger
            reached = np.abs(sums) + EARLIER * earlier / k
            if k < FEWEST or not self.can_reject(k, error):
                continue
            here, others = float(reached[0]), reached[counted:]
            bound = 0.0 if k == last else _boundary(k, squares, self.interim * error)
            above = _above(others[alive & (others >= bound)], room)
            if squares > 0 and here >= bound and here > above:
                return Outcome(k, float(np.mean(~alive | (others >= here))), int(np.sign(d[:k].sum())))
            hit = alive & (others >= bound) & (others > above)
            room -= int(hit.sum())
            alive &= ~hit
        return Outcome(0, float(np.mean(~alive | (reached[counted:] >= reached[0]))))


@lru_cache(maxsize=4)
def _patterns(seeds: int) -> FloatArray:
    """Return patterns of signs, (seeds, patterns); the first is +, as a pattern's reverse counts alike."""
    listed = min(seeds, ENUMERATED) - 1
    bits = np.arange(2**listed) >> np.arange(listed)[:, None] & 1
    drawn = np.random.default_rng(0).integers(0, 2, (max(0, seeds - ENUMERATED), bits.shape[1]))
    return np.vstack([np.ones((1, bits.shape[1])), 2.0 * bits - 1, 2.0 * drawn - 1])


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
