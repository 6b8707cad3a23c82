"""Where the next seed, and the error, are expected to settle most.

The error is shared by the sizes of the first differences (after Westfall, Kropf and Finos, "Weighted
FWE-controlling methods in high-dimensional situations", 2004). Where differences are as likely to have
either sign, their sizes tell nothing of the signs, by which the test decides: so it may be told them.

A seed goes where the chance that a difference is found is largest per cost. That is the predictive power: the
chance that the normal score, whose drift is only known from the seeds so far, passes the boundary of a later
look (Spiegelhalter, Freedman and Blackburn 1986, doi:10.1016/0197-2456(86)90003-6).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from retrain.base.rollouts import Floats
from retrain.control.rules.sequential import FINAL, SequentialComparison
from retrain.control.rules.sequential.rejection import NORMAL, score

STEEPNESS = 4.0  # of the shares in the mean square of differences: nearly all error goes where it is largest
LEAST = 1e-60  # mean square, relative to the largest, so that shares are numbers also if all are 0
STEPS = 16  # of a share per halving: rounding costs 4 % of it at most
FEWEST_STEPS = 30 * STEPS  # a share of 2**-30 rejects no pattern of signs, and a smaller one no fewer


def weights_of_error(first: Mapping[str, Floats]) -> dict[str, float]:
    """Return the weight of each comparison, by the sizes of its first differences.

    The error is shared in proportion to the weights of those that are left; these never change, so a share
    only grows while others are found. A comparison without any difference, as its runs failed, has the
    smallest weight of all.
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
