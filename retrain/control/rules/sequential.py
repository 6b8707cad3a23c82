"""Sequential comparison of two conditions by paired seeds: stop as soon as the evidence suffices.

If two conditions have the same distribution, each difference between them is as likely to have either sign,
whatever its distribution. So the sizes of the differences are taken as given and the test is made over their
signs: of all patterns of signs, at most the share `error` may lead to a rejection at any look. That is the
exact sign-flip test (Fisher, The Design of Experiments, 1935), made sequential by spending the error on
patterns as looks pass, as AdaStop does (Mathieu et al., arXiv:2306.10882) for permutations. Up to 14 seeds
all patterns are counted; with more, the signs from the 15th on are a fixed sample, so the error holds up to
its sampling error. With so few `max_seeds` that no pattern is rare enough, nothing is found: a t test would
rest on its assumption there, as three differences of one sign come by chance in one of four campaigns.

Looks before the last reject only by a strict boundary of Student's t (Haybittle 1971, Peto 1976), so nearly
all the error is left for the last look, and the power is close to that of one test with all seeds. A
comparison that is unlikely to be decided is ended early by its conditional power (Lan, Simon and Halperin,
1982); this is not binding, as the error does not count on it, whatever the bound of that power.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from retrain.base.rollouts import Floats
from retrain.config.flow import is_count
from retrain.control.rules import StateDict, require

Verdict: TypeAlias = Literal["continue", "better", "worse", "no_difference", "undecided"]

FINAL = 0.42  # nominal one-sided error of the last look, as a share of the whole; for conditional power only
FUTILE = 0.22  # conditional power below which a comparison ends
EARLY_FUTILE = 0.7  # the same of a comparison that is to end early
AT_RUNGS_FUTILE = 0.45  # the same of one at rungs, whose runs go further and cost more
OUTLIER = 4.0  # times the median size; further out, a difference counts for the conditional power as if there
OPTIMISM = 1.0  # standard errors by which the trend is raised for the conditional power
ROUNDING = 1e-12  # relative to the values; smaller differences are rounding errors
LARGEST = 1e100  # differences in such units; squares of larger ones might overflow
MOST = 1000  # seeds: their patterns take 0.2 GB
LEAST_ERROR = 1e-100  # and a share of it: a smaller one has no quantile
HALVINGS = 40  # of the bracket around a bound of the interval
FARTHEST = 2.0**60  # spreads from the differences; a bound beyond it is infinite


@dataclass(frozen=True)
class Look:
    """What is known of a - b after some seeds.

    `interval` covers the difference with probability 1 - error / comparisons at every look (repeated
    confidence interval: Jennison and Turnbull, 1989); it is computed when first read. `p_value` orders by
    look, then by distance from 0, and is valid at every look up to the first that finds a difference. It is
    at most `error` if a difference was found, also where the verdict is "no_difference" because what was
    found is smaller than `smallest_difference`; above `error`, it describes this look alone.
    """

    verdict: Verdict
    seeds: int
    difference: float  # mean of a - b
    p_value: float
    differences: tuple[float, ...]  # a - b of each seed, in units of the resolution
    resolution: float  # smaller differences are rounding errors of the metric
    comparison: SequentialComparison
    final: bool = False  # no seed follows

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Differences not yet excluded; infinite while there are too few seeds to exclude any."""
        d = np.array(self.differences)
        if not self.comparison.test.can_reject(len(d), self.comparison.error_of_each):
            return -math.inf, math.inf
        if not np.ptp(d):
            return self.difference, self.difference
        low, high = self._lower_bound(d), -self._lower_bound(-d)
        return min(low * self.resolution, self.difference), max(high * self.resolution, self.difference)

    def _lower_bound(self, d: Floats) -> float:
        """Return a mean that is rejected as too low, next to one that is not."""

        def is_too_low(mean: float) -> bool:
            outcome = self.comparison.test.outcome(d - mean, self.comparison.error_of_each, final=self.final)
            return outcome.sign > 0

        kept, step = float(d.max()), float(np.ptp(d))  # the largest difference is above no other
        farthest = FARTHEST * step
        while not is_too_low(rejected := float(d.min()) - step):
            kept, step = rejected, 4 * step
            if step > farthest:
                return -math.inf
        for _ in range(HALVINGS):
            middle = (rejected + kept) / 2
            rejected, kept = (middle, kept) if is_too_low(middle) else (rejected, middle)
        return rejected


@dataclass(frozen=True)
class SequentialComparison:
    """Compare two conditions after every seed, with at most `error` false verdicts over all looks.

    Args:
        max_seeds: most seeds a condition gets, 3 to 1000. With so few that even equal signs throughout
            are no rare pattern (below 6 for an error of 0.05, below 8 if 4 comparisons share it), no
            difference is ever found; `fewest_seeds` tells how many it takes.
        error: probability of a false "better" or "worse" over all looks and comparisons: a bound up to
            14 seeds, within the sampling error of the patterns above.
        smallest_difference: a smaller difference does not matter, in units of the metric; None: any matters.
        comparisons: with how many of them the error is shared (Bonferroni).
        early: find large differences with fewer seeds, and give small ones up sooner: for tight budgets.

    Raises:
        ValueError: a setting is out of range.
    """

    max_seeds: int = 12
    error: float = 0.05
    smallest_difference: float | None = None
    comparisons: int = 1
    early: bool = False

    def __post_init__(self) -> None:
        smallest = self.smallest_difference
        require(
            "max_seeds",
            self.max_seeds,
            is_count(self.max_seeds, FEWEST) and self.max_seeds <= MOST,
            f"a whole number from {FEWEST} to {MOST}",
        )
        require("error", self.error, LEAST_ERROR <= self.error < 1.0, f"at least {LEAST_ERROR} and below 1")
        matters = smallest is None or (smallest > 0.0 and math.isfinite(smallest))
        require("smallest_difference", smallest, matters, "positive, or None")
        require(
            "comparisons", self.comparisons, is_count(self.comparisons, 1), "a whole number of at least 1"
        )

    @property
    def error_of_each(self) -> float:
        """Error of this comparison alone."""
        return self.error / self.comparisons

    @property
    def fewest_seeds(self) -> int:
        """Seeds without which no difference is found."""
        return fewest_seeds(self.error_of_each)

    @property
    def can_find(self) -> bool:
        return self.test.can_reject(self.max_seeds, self.error_of_each)

    @cached_property
    def test(self) -> SignFlips:
        """How a difference is told from chance."""
        return SignFlips(self.max_seeds, EARLY_INTERIM if self.early else INTERIM)

    def look(
        self,
        a: Sequence[float] | Floats,
        b: Sequence[float] | Floats,
        *,
        final: bool = False,
        later_errors: Sequence[float] = (),
        has_rungs: bool = False,
    ) -> Look:
        """Return the verdict on a - b after the seeds so far.

        "better" means that a is larger. A difference stays found once an earlier look would have found it,
        unless `smallest_difference` is given and later seeds show that the difference is smaller.

        Args:
            a, b: the metric of each seed, in the same order of seeds; 2 to `max_seeds` values.
            final: no seed follows, for a reason other than the values, so this look spends all error
                that is left, as that after `max_seeds` does.
            later_errors: what `error / comparisons` may become as others are found and leave it their
                share. A difference is found only if each of these finds it too: so what is found with
                less error is found with more, as Holm's procedure supposes (see `retrain.plan.decision`).
            has_rungs: these runs are compared at several rungs, and each is given up sooner.

        Raises:
            ValueError: the lengths differ, there are too few or too many values, or one is not finite.
        """
        require("seeds", len(a), 2 <= len(a) <= self.max_seeds, f"2 to {self.max_seeds} (max_seeds)")
        require("values of b", len(b), len(a) == len(b), f"as many as those of a, {len(a)}")
        values = np.array([a, b], np.float64)
        require("values", values.tolist(), bool(np.isfinite(values).all()), "finite numbers")
        d, resolution = _differences(*values)
        outcome = self.test.outcome(d, self.error_of_each, final=final)
        if outcome.rejected_at:
            later = (self.test.outcome(d, error, final=final) for error in later_errors)
            if any(stricter.sign != outcome.sign for stricter in later):
                outcome = Rejection(0, outcome.share)
        p_value = min(1.0, outcome.share * self.comparisons)
        if not outcome.rejected_at:
            p_value = max(p_value, math.nextafter(self.error, 1.0))
        smallest = self.smallest_difference
        if smallest is not None:
            smallest = min(smallest / resolution, LARGEST)  # in the units of d
        futile = EARLY_FUTILE if self.early else AT_RUNGS_FUTILE if has_rungs else FUTILE
        verdict = self._verdict(d, outcome, smallest, final, futile)
        mean = float(d.mean()) * resolution
        return Look(verdict, len(d), mean, p_value, tuple(d.tolist()), resolution, self, final)

    def state_dict(self) -> StateDict:
        """Return the settings as plain data; the seeds' values are all else that a look depends on."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: StateDict) -> SequentialComparison:
        """Return the comparison that `state_dict` described."""
        return cls(**state)

    def _verdict(
        self, d: Floats, outcome: Rejection, smallest: float | None, final: bool, futile: float
    ) -> Verdict:
        is_small = smallest is not None and abs(d.mean()) < smallest
        if is_small and smallest and self._negligible_from(d, smallest, final=final) <= len(d):
            return "no_difference"
        if outcome.rejected_at:
            return "better" if outcome.sign > 0 else "worse"
        if final or len(d) == self.max_seeds:
            return "undecided"
        is_hopeless = (smallest is None or is_small) and self._found_later(d) < futile
        return "no_difference" if is_hopeless else "continue"

    def _negligible_from(self, d: Floats, smallest: float, *, final: bool = False) -> int:
        """Return after how many seeds the interval excludes differences that matter; more than all: never."""
        shifts = np.array([[smallest], [-smallest]])
        below, above = (
            self.test.outcome(shifted, self.error_of_each, final=final) for shifted in np.rint(d - shifts)
        )
        excludes = below.sign < 0 < above.sign
        return max(below.rejected_at, above.rejected_at) if excludes else len(d) + 1

    def _found_later(self, d: Floats) -> float:
        """Return the conditional power."""
        if len(d) < FEWEST:
            return 1.0
        done = len(d) / self.max_seeds  # information so far; the score moves as a Brownian motion in it
        far = OUTLIER * float(np.median(np.abs(d[d != 0]))) if d.any() else 0.0
        z = score(np.clip(d, -far, far))  # one collapsed seed would hide that the others are alike
        drift = (z + OPTIMISM) / math.sqrt(done)
        to_go = -NORMAL.inv_cdf(FINAL * self.error_of_each) - z * math.sqrt(done) - drift * (1 - done)
        return NORMAL.cdf(-to_go / math.sqrt(1 - done))


def _differences(a: Floats, b: Floats) -> tuple[Floats, float]:
    """Return a - b in whole units of the values' resolution, and that unit, so that no sum is inexact."""
    size = float(np.abs([a, b]).max())
    unit = 10.0 ** math.floor(math.log10(ROUNDING * size)) if ROUNDING * size > 0.0 else 0.0
    if not unit > 0.0:  # all are 0, or too small for such a unit
        return np.zeros_like(a), 1.0
    return np.rint(a / unit - b / unit), unit


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
            bound = 0.0
            if not is_last:  # the |sum| at which Student's t has this two-sided error
                z = -NORMAL.inv_cdf(self.interim * error / 2) / _wallace(k - 1)
                bound = math.sqrt(k * squares * -math.expm1(-z * z / (k - 1)))
            # the value that the `room` largest exceed; ties that do not fit are left out together
            reaching = others[alive & (others >= bound)]
            above = float(-np.partition(-reaching, room)[room]) if len(reaching) > room else -math.inf
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


def _wallace(freedom: int) -> float:
    """Return the factor of Wallace's transform of Student's t to a normal score (1959)."""
    return (8 * freedom + 1) / (8 * freedom + 3)


def score(d: Floats) -> float:
    """Return the normal score of Student's t of the differences, without its sign."""
    seeds, squares, total = len(d), float((d * d).sum()), float(d.sum())
    if squares == 0:
        return 0.0
    share = min(total * total / (seeds * squares), 1 - 1e-12)  # of the squares, which the mean explains
    return _wallace(seeds - 1) * math.sqrt((seeds - 1) * -math.log1p(-share))


STEEPNESS = 4.0  # of the shares in the mean square of differences: nearly all error goes where it is largest
LEAST = 1e-60  # mean square, relative to the largest, so that shares are numbers also if all are 0
STEPS = 16  # of a share per halving: rounding costs 4 % of it at most
FEWEST_STEPS = 30 * STEPS  # a share of 2**-30 rejects no pattern of signs, and a smaller one no fewer


def weights_of_error(first: Mapping[str, Floats]) -> dict[str, float]:
    """Return the weight of each comparison, by the sizes of its first differences.

    Where differences are as likely to have either sign, their sizes tell nothing of the signs, by which the
    test decides: so the error may follow them (Westfall, Kropf and Finos, "Weighted FWE-controlling methods
    in high-dimensional situations", 2004). It is shared in proportion to the weights of those that are left;
    these never change, so a share only grows while others are found. A comparison without any difference, as
    its runs failed, has the smallest weight of all.
    """
    differences = {name: d for name, d in first.items() if len(d)}
    largest = max((float(np.abs(d).max()) for d in differences.values()), default=0.0) or 1.0
    squares = {name: float(np.mean((d / largest) ** 2)) for name, d in differences.items()}
    top = max(squares.values(), default=0.0) or 1.0
    weights = {name: math.pow(max(square / top, LEAST), STEEPNESS) for name, square in squares.items()}
    return dict.fromkeys(first, min(weights.values(), default=1.0)) | weights


def rising_errors(error: float, share: float) -> list[float]:
    """Return a share of an error, rounded down to one of few levels, and all levels above it."""
    steps = min(FEWEST_STEPS, math.ceil(-STEPS * math.log2(share) - 1e-9))
    return [error * 2 ** (-step / STEPS) for step in range(steps, -1, -1)]


def found_per_cost(comparison: SequentialComparison, d: Floats, costs: Sequence[float]) -> float:
    """Return the largest chance of finding a difference, divided by what it costs until then.

    The predictive power: the chance that the normal score, whose drift is only known from the seeds so far,
    passes the boundary of a later look (Spiegelhalter, Freedman and Blackburn 1986,
    doi:10.1016/0197-2456(86)90003-6).

    Args:
        comparison: the test.
        d: differences of the seeds so far.
        costs: of each further seed, in the order in which they would follow.
    """
    seeds, z, spent, best = len(d), score(d), 0.0, 0.0
    for more, cost in enumerate(costs, 1):
        look, spent = seeds + more, spent + cost
        if comparison.fewest_seeds <= look <= comparison.max_seeds:
            share = FINAL if look == comparison.max_seeds else comparison.test.interim / 2
            bound = -NORMAL.inv_cdf(share * comparison.error_of_each)
            fraction = seeds / look
            chance = NORMAL.cdf((z - bound * math.sqrt(fraction)) / math.sqrt(1 - fraction))
            best = max(best, chance / spent)
    return best
