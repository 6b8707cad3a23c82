"""Where the next seed is expected to settle most: the chance that a difference is found, per cost.

The chance is the predictive power: that the normal score, whose drift is only known from the seeds so far,
passes the boundary of a later look (Spiegelhalter, Freedman and Blackburn 1986,
doi:10.1016/0197-2456(86)90003-6).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from retrain.controllers.sequential import FINAL, SequentialComparison
from retrain.controllers.sequential.rejection import INTERIM, NORMAL, FloatArray, score


def found_per_cost(comparison: SequentialComparison, d: FloatArray, costs: Sequence[float]) -> float:
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
            share = FINAL if look == comparison.max_seeds else INTERIM / 2
            bound = NORMAL.inv_cdf(1 - share * comparison.error_of_each)
            known = seeds / look
            chance = NORMAL.cdf((z - bound * math.sqrt(known)) / math.sqrt(1 - known))
            best = max(best, chance / spent)
    return best
