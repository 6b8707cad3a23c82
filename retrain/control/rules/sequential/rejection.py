"""The sequential test of whether the mean of differences is 0, over the patterns of their signs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from retrain.base.rollouts import Floats

FEWEST = 3  # seeds before a verdict
INTERIM = 0.09  # nominal two-sided error of an early look, as a share of the whole
EARLY_INTERIM = 0.3  # the same of a comparison that is to end early
ENUMERATED = 14  # seeds whose patterns of signs are all counted; further signs are drawn
EARLIER = 1e-7  # weight of the earlier sums, which orders sums that are equal
REPEATED = 4096  # looks that are kept: a campaign repeats its own at each round
KEPT = 128  # sets of patterns, at most 20 MB
SHALLOW = 100  # looks between calls of their own, so that recursion never goes deeper
WIDTH = 8  # bytes of a difference
NORMAL = NormalDist()
LARGEST_EXPONENT = 700.0  # of a float


@dataclass(frozen=True)
class Rejection:
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

    def outcome(self, d: Floats, error: float, *, final: bool = False) -> Rejection:
        """Return where differences stand that were looked at after each seed; `final`: none will follow."""
        return self._outcome(d.tobytes(), error, len(d) if final else self.max_seeds)

    @lru_cache(maxsize=REPEATED)  # noqa: B019  # of frozen values, and bounded
    def _outcome(self, differences: bytes, error: float, last: int) -> Rejection:
        count = len(differences) // WIDTH
        for k in range(SHALLOW, count, SHALLOW):
            self._after(differences[: k * WIDTH], error)
        return self._after(differences, error, is_last=count == last).outcome

    @lru_cache(maxsize=KEPT)  # noqa: B019  # as above; so a look takes the time of one, not of all before
    def _after(self, differences: bytes, error: float, *, is_last: bool = False) -> _Patterns:
        """Return the patterns after a look at each of the differences; `is_last`: none will follow."""
        if not differences:
            none = np.zeros(1 + _patterns(self.max_seeds).shape[1])
            alive = np.ones(len(none) - self._counted, bool)
            room = math.floor(error * len(alive) * (1 + 1e-12))
            return _Patterns(none, none, alive, room, 0.0, Rejection(0, 1.0))
        before = self._after(differences[:-WIDTH], error)
        if before.outcome.rejected_at:
            return before
        k, last = len(differences) // WIDTH, float(np.frombuffer(differences)[-1])
        signs, size = _patterns(self.max_seeds)[k - 1], abs(last)
        squares, sums = before.squares + size * size, before.sums.copy()
        sums[0] += last
        sums[1:] += signs * size
        earlier = before.earlier + np.abs(sums)
        # ties of few distinct values would leave error unspent, so what got there earlier is larger
        reached = np.abs(sums) + EARLIER * earlier / k
        observed, others = float(reached[0]), reached[self._counted :]
        alive, room, rejected_at = before.alive, before.room, 0
        if k >= FEWEST and self.can_reject(k, error):
            bound = 0.0 if is_last else _boundary(k, squares, self.interim * error)
            above = _above(others[alive & (others >= bound)], room)
            if squares > 0 and observed >= bound and observed > above:
                rejected_at = k
            else:
                hit = alive & (others >= bound) & (others > above)
                alive, room = alive & ~hit, room - int(hit.sum())
        sign = int(np.sign(sums[0])) if rejected_at else 0
        outcome = Rejection(rejected_at, float(np.mean(~alive | (others >= observed))), sign)
        return _Patterns(sums, earlier, alive, room, squares, outcome)

    @property
    def _counted(self) -> int:
        """Where the patterns that are counted begin: with what was seen, if they are a sample."""
        return 0 if self.max_seeds > ENUMERATED else 1


@dataclass(frozen=True)
class _Patterns:
    """All patterns of signs after some looks; the first is what was seen."""

    sums: Floats
    earlier: Floats  # sums of the sizes of all sums so far
    alive: NDArray[np.bool_]  # of those that are counted: whether none of these looks rejects them
    room: int  # how many may still be rejected
    squares: float
    outcome: Rejection  # of what was seen


@lru_cache(maxsize=4)
def _patterns(seeds: int) -> Floats:
    """Return patterns of signs, (seeds, patterns); the first is +, as a pattern's reverse counts alike."""
    listed = min(seeds, ENUMERATED) - 1
    bits = np.arange(2**listed) >> np.arange(listed)[:, None] & 1
    drawn = np.random.default_rng(0).integers(0, 2, (max(0, seeds - ENUMERATED), bits.shape[1]))
    return np.vstack([np.ones((1, bits.shape[1])), 2.0 * bits - 1, 2.0 * drawn - 1])


def _above(sums: Floats, room: int) -> float:
    """Return the value that the `room` largest sums exceed; ties that do not fit are left out together."""
    if len(sums) <= room:
        return -math.inf
    return float(np.partition(sums, len(sums) - room - 1)[len(sums) - room - 1])


def _wallace(freedom: int) -> float:
    """Return the factor of Wallace's transform of Student's t to a normal score (1959)."""
    return (8 * freedom + 1) / (8 * freedom + 3)


def _boundary(seeds: int, squares: float, error: float) -> float:
    """Return the |sum| of differences at which Student's t has this two-sided error."""
    z = -NORMAL.inv_cdf(error / 2) / _wallace(seeds - 1)
    return math.sqrt(seeds * squares * -math.expm1(-z * z / (seeds - 1)))


def score(d: Floats) -> float:
    """Return the normal score of Student's t of the differences, without its sign."""
    seeds, squares, total = len(d), float((d * d).sum()), float(d.sum())
    if squares == 0:
        return 0.0
    share = min(total * total / (seeds * squares), 1 - 1e-12)  # of the squares, which the mean explains
    return _wallace(seeds - 1) * math.sqrt((seeds - 1) * -math.log1p(-share))


def half_width(differences: Sequence[float], error: float) -> float:
    """Return half of Student's interval of a mean: by Wallace's transform, a few percent wide."""
    freedom = len(differences) - 1
    exponent = (NORMAL.inv_cdf(error / 2) / _wallace(freedom)) ** 2 / freedom
    if exponent > LARGEST_EXPONENT:
        return math.inf
    return math.sqrt(freedom * math.expm1(exponent) / len(differences)) * statistics.stdev(differences)
