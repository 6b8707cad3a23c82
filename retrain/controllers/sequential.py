"""Sequential comparison of two conditions by paired seeds: stop as soon as the evidence suffices.

If two conditions are equal, each difference between them is as likely to have either sign, whatever its
distribution. So the sizes of the differences are taken as given and the test is made over their signs: of
all patterns of signs, at most the share `error` may lead to a rejection at any look. That is the exact
sign-flip test (Fisher, The Design of Experiments, 1935), made sequential by spending the error on patterns
as looks pass, as AdaStop does (Mathieu et al., arXiv:2306.10882) for permutations.

Looks before the last reject only by a strict boundary of Student's t (Haybittle 1971, Peto 1976), so nearly
all the error is left for the last look, and the power is close to that of one test with all seeds. A
comparison that is unlikely to be decided is ended early by its conditional power (Lan, Simon and Halperin,
1982); this is not binding, as the error does not count on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from retrain.controllers import require

FloatArray: TypeAlias = NDArray[np.float64]
Verdict: TypeAlias = Literal["continue", "better", "worse", "no_difference", "undecided"]

FEWEST = 3  # seeds before a verdict
INTERIM = 0.09  # nominal two-sided error of an early look, as a share of the whole
FINAL = 0.42  # nominal one-sided error of the last look, as a share of the whole; for conditional power only
FUTILE = 0.25  # conditional power below which a comparison ends
OPTIMISM = 1.0  # standard errors by which the trend is raised for the conditional power
ENUMERATED = 14  # seeds whose patterns of signs are all counted; further signs are drawn
EARLIER = 1e-7  # weight of the earlier sums, which orders sums that are equal
NORMAL = NormalDist()


@dataclass(frozen=True)
class Outcome:
    """Where a sequence of differences stands among all patterns of its signs."""

    rejected_at: int  # the first look, in seeds, that rejects a mean of 0; 0: none so far
    share: float  # of patterns that are rejected before, or at the same look and at least as far from 0


@dataclass(frozen=True)
class Look:
    """What is known of a - b after some seeds.

    `interval` covers the difference with probability 1 - error / comparisons at every look (repeated
    confidence interval: Jennison and Turnbull, 1989); it is computed when first read. `p_value` orders by
    look, then by distance from 0. It is at most `error` if and only if a difference was found, and valid at
    every look up to there; above, it describes this look alone.
    """

    verdict: Verdict
    seeds: int
    difference: float  # mean of a - b
    p_value: float
    differences: tuple[float, ...]  # a - b of each seed
    comparison: SequentialComparison

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Differences not yet excluded; infinite while there are too few seeds to exclude any."""
        d = np.array(self.differences)
        test, error = self.comparison.test, self.comparison.error_of_each

        def bound(side: float) -> float:
            near, step = self.difference, float(np.std(d)) or abs(self.difference) or 1.0
            while not test.outcome(d - (self.difference + side * step), error).rejected_at:
                near, step = self.difference + side * step, 2 * step
                if step > 1e12 * (abs(near) + 1.0):
                    return side * math.inf
            far = self.difference + side * step
            while abs(far - near) > 1e-6 * step:
                middle = (near + far) / 2
                is_out = test.outcome(d - middle, error).rejected_at
                near, far = (near, middle) if is_out else (middle, far)
            return far

        if not test.can_reject(len(d), error):
            return -math.inf, math.inf
        return bound(-1.0), bound(1.0)


@dataclass(frozen=True)
class SequentialComparison:
    """Compare two conditions after every seed, with at most `error` false verdicts over all looks.

    Args:
        max_seeds: most seeds a condition gets, at least 3. Below 6 seeds (for an error of 0.05) no test
            without assumptions can reject; the differences are then taken as normal.
        error: probability of a false "better" or "worse" over all looks and comparisons.
        smallest_difference: a smaller difference does not matter, in units of the metric; None: any matters.
        comparisons: with how many of them the error is shared (Bonferroni).

    Raises:
        ValueError: a setting is out of range.
    """

    max_seeds: int = 12
    error: float = 0.05
    smallest_difference: float | None = None
    comparisons: int = 1

    def __post_init__(self) -> None:
        smallest = self.smallest_difference
        require(
            "max_seeds",
            self.max_seeds,
            _is_whole(self.max_seeds, FEWEST),
            f"a whole number of at least {FEWEST}",
        )
        require("error", self.error, 0.0 < self.error < 1.0, "between 0 and 1")
        matters = smallest is None or (smallest > 0.0 and math.isfinite(smallest))
        require("smallest_difference", smallest, matters, "positive, or None")
        require(
            "comparisons", self.comparisons, _is_whole(self.comparisons, 1), "a whole number of at least 1"
        )

    @property
    def error_of_each(self) -> float:
        """Error of this comparison alone."""
        return self.error / self.comparisons

    @cached_property
    def test(self) -> SignFlips | Normal:
        """How a difference is told from chance."""
        flips = SignFlips(self.max_seeds)
        return flips if flips.can_reject(self.max_seeds, self.error_of_each) else Normal(self.max_seeds)

    def look(self, a: Sequence[float] | FloatArray, b: Sequence[float] | FloatArray) -> Look:
        """Return the verdict on a - b after the seeds so far.

        "better" means that a is larger. A difference stays found once an earlier look would have found it.

        Args:
            a, b: the metric of each seed, in the same order of seeds; 2 to `max_seeds` values.

        Raises:
            ValueError: the lengths differ, there are too few or too many values, or one is not finite.
        """
        require("seeds", len(a), 2 <= len(a) <= self.max_seeds, f"2 to {self.max_seeds} (max_seeds)")
        require("values of b", len(b), len(a) == len(b), f"as many as those of a, {len(a)}")
        d = np.asarray(a, np.float64) - np.asarray(b, np.float64)
        require("differences", d.tolist(), bool(np.isfinite(d).all()), "finite numbers")
        outcome = self.test.outcome(d, self.error_of_each)
        p_value = min(1.0, outcome.share * self.comparisons)
        if not outcome.rejected_at:
            p_value = max(p_value, math.nextafter(self.error, 1.0))
        verdict = self._verdict(d, outcome)
        return Look(verdict, len(d), float(d.mean()), p_value, tuple(d.tolist()), self)

    def state_dict(self) -> dict[str, float | None]:
        """Return the settings as plain data; the seeds' values are all else that a look depends on."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> SequentialComparison:
        """Return the comparison that `state_dict` described."""
        return cls(**state)

    def _verdict(self, d: FloatArray, outcome: Outcome) -> Verdict:
        if self._is_negligible(d):
            return "no_difference"
        if outcome.rejected_at:
            return "better" if d[: outcome.rejected_at].sum() > 0 else "worse"
        if len(d) == self.max_seeds:
            return "undecided"
        small = self.smallest_difference is None or abs(d.mean()) < self.smallest_difference
        return "no_difference" if small and self._is_futile(d) else "continue"

    def _is_negligible(self, d: FloatArray) -> bool:
        """Whether the interval lies within the differences that do not matter."""
        smallest = self.smallest_difference
        if smallest is None or abs(d.mean()) >= smallest:
            return False
        bounds = (smallest, -smallest)
        return all(self.test.outcome(d - bound, self.error_of_each).rejected_at for bound in bounds)

    def _is_futile(self, d: FloatArray) -> bool:
        if len(d) < FEWEST:
            return False
        done = len(d) / self.max_seeds  # information so far; the score moves as a Brownian motion in it
        z = _score(d)
        drift = (z + OPTIMISM) / math.sqrt(done)
        to_go = NORMAL.inv_cdf(1 - FINAL * self.error_of_each) - z * math.sqrt(done) - drift * (1 - done)
        return NORMAL.cdf(-to_go / math.sqrt(1 - done)) < FUTILE


@dataclass(frozen=True)
class SignFlips:
    """The exact sequential test over patterns of signs."""

    max_seeds: int

    def can_reject(self, seeds: int, error: float) -> bool:
        """Whether the most extreme pattern of so many signs is rare enough."""
        return 2.0 ** (1 - seeds) <= error

    def outcome(self, d: FloatArray, error: float) -> Outcome:
        """Return where differences stand that were looked at after each seed."""
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
            bound = 0.0 if k == self.max_seeds else _boundary(k, squares[k - 1], INTERIM * error)
            above = _above(reached[alive & (reached >= bound)], room)
            if squares[k - 1] > 0 and here >= bound and here > above:
                return Outcome(k, float(np.mean(~alive | (reached >= here))))
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

    def outcome(self, d: FloatArray, error: float) -> Outcome:
        """Return where differences stand that were looked at after each seed."""
        before = 0.0
        for k in range(FEWEST, len(d) + 1):
            nominal = error * INTERIM if k < self.max_seeds else error - before
            total, squares = abs(float(d[:k].sum())), float((d[:k] ** 2).sum())
            if squares > 0 and total >= _boundary(k, squares, nominal):
                return Outcome(k, before + 2 * NORMAL.cdf(-_score(d[:k])))
            before += nominal
        return Outcome(0, 2 * NORMAL.cdf(-_score(d)))


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


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


def _score(d: FloatArray) -> float:
    """Return the normal score of Student's t of the differences, without its sign."""
    seeds, squares, total = len(d), float((d * d).sum()), float(d.sum())
    if squares == 0:
        return 0.0
    share = min(total * total / (seeds * squares), 1 - 1e-12)  # of the squares, which the mean explains
    return _wallace(seeds - 1) * math.sqrt((seeds - 1) * -math.log1p(-share))
